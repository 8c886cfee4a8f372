"""Which transports this worker can offer, made for its engine's memory, and why the others are missing.

Asked once, after the model is loaded. A transport that the user insists on and that cannot be had ends the worker with
one sentence; under `auto` it is left out, and its reason stands wherever a lesser path is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.messages import Node, TransportOffer
from kvtransfer.paths import BETWEEN_PROCESSES, Export, Import, NoPath
from kvtransfer.startup import Engine
from kvtransfer.transports.memfd import MemfdExport, MemfdImport
from wire.worker import CannotStart


@dataclass(frozen=True, slots=True)
class Transports:
    """What one worker offers, the best first. An owner has `exports`, a puller `imports`; grpc needs neither."""

    kinds: Sequence[str]
    exports: Sequence[Export] = ()
    imports: Sequence[Import] = ()
    missing: dict[str, str] = field(default_factory=dict)  # kind -> a few words

    @property
    def offers(self) -> list[TransportOffer]:
        """For hello: names alone. What they need to connect goes to each puller, when it pairs."""
        return [TransportOffer(kind) for kind in self.kinds]

    def __str__(self) -> str:
        return "KV by " + " or ".join(self.kinds)


def owner_transports(transport: str, engine: Engine, node: Node) -> Transports:
    """`transport` is the flag. Raises CannotStart."""
    exports: list[Export] = []
    missing: dict[str, str] = {}
    for kind in _wanted(transport):
        try:
            exports.append(_export(kind, engine, node))
        except NoPath as refusal:
            _note(transport, kind, str(refusal), missing)
    return Transports(_kinds(transport, exports), exports=exports, missing=missing)


def puller_transports(transport: str, engine: Engine, node: Node) -> Transports:
    """`transport` is the flag. Raises CannotStart."""
    imports: list[Import] = []
    missing: dict[str, str] = {}
    for kind in _wanted(transport):
        try:
            imports.append(_import(kind, engine, node))
        except NoPath as refusal:
            _note(transport, kind, str(refusal), missing)
    return Transports(_kinds(transport, imports), imports=imports, missing=missing)


def _wanted(transport: str) -> list[str]:
    return [kind for kind in BETWEEN_PROCESSES if kind != "grpc" and transport in ("auto", kind)]


def _kinds(transport: str, made: Sequence[Export | Import]) -> list[str]:
    return [each.kind for each in made] + (["grpc"] if transport in ("auto", "grpc") else [])


def _note(transport: str, kind: str, reason: str, missing: dict[str, str]) -> None:
    if transport == kind:
        raise CannotStart(f"--transport {kind} cannot be had here: {reason}")
    if reason:
        missing[kind] = reason


def _export(kind: str, engine: Engine, node: Node) -> Export:
    """Raises NoPath; without words where nobody would expect this kind."""
    if kind == "memfd":
        if engine.memory is None:
            raise NoPath("it moves blocks of the CPU's memory, and this worker's are not shared")
        return MemfdExport(node.incarnation, engine.layout, engine.memory)
    raise NoPath("it is not built")


def _import(kind: str, engine: Engine, node: Node) -> Import:
    """Raises NoPath; without words where nobody would expect this kind."""
    if kind == "memfd":
        if engine.on_card:
            raise NoPath("it moves blocks of the CPU's memory, and this worker's are on a card")
        return MemfdImport(engine.layout)
    raise NoPath("it is not built")
