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
from kvtransfer.ticket import layout_digest
from kvtransfer.transports import nixl
from kvtransfer.transports.cuda_ipc import CardCache, CudaIpcExport, CudaIpcImport
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

    async def prove(self) -> None:
        """Starts what a path needs that the user insists on: else its fault would show when the first pair meets.
        Raises CannotStart."""
        if "grpc" in self.kinds:
            return
        chosen: list[Export | Import] = [*self.exports, *self.imports]
        for each in chosen:
            try:
                await each.prepare()
            except NoPath as refusal:
                raise _cannot(each.kind, refusal) from refusal

    def __str__(self) -> str:
        return "KV by " + " or ".join(self.kinds)


def owner_transports(transport: str, engine: Engine, node: Node) -> Transports:
    """`transport` is the flag. Raises CannotStart."""
    exports: list[Export] = []
    missing: dict[str, str] = {}
    for kind in _wanted(transport, engine.on_card):
        try:
            exports.append(_export(kind, engine, node))
        except NoPath as refusal:
            _note(transport, kind, str(refusal), missing)
    return Transports(_kinds(transport, exports), exports=exports, missing=missing)


def puller_transports(transport: str, engine: Engine, node: Node) -> Transports:
    """`transport` is the flag. Raises CannotStart."""
    imports: list[Import] = []
    missing: dict[str, str] = {}
    for kind in _wanted(transport, engine.on_card):
        try:
            imports.append(_import(kind, engine, node))
        except NoPath as refusal:
            _note(transport, kind, str(refusal), missing)
    return Transports(_kinds(transport, imports), imports=imports, missing=missing)


def _wanted(transport: str, on_card: bool) -> list[str]:
    """`auto` does not look for what moves blocks of the other kind of memory: nobody would miss it."""
    other = "memfd" if on_card else "cuda_ipc"
    wanted = [kind for kind in BETWEEN_PROCESSES if kind not in ("grpc", other)] if transport == "auto" else [transport]
    return [kind for kind in wanted if kind != "grpc"]


def _kinds(transport: str, made: Sequence[Export | Import]) -> list[str]:
    return [each.kind for each in made] + (["grpc"] if transport in ("auto", "grpc") else [])


def _note(transport: str, kind: str, reason: str, missing: dict[str, str]) -> None:
    if transport == kind:
        raise _cannot(kind, reason)
    if reason:
        missing[kind] = reason


def _cannot(kind: str, reason: object) -> CannotStart:
    return CannotStart(f"--transport {kind} cannot be had here: {reason}")


def _export(kind: str, engine: Engine, node: Node) -> Export:
    """Raises NoPath; without words where nobody would expect this kind."""
    if kind == "memfd":
        if engine.memory is None:
            raise NoPath("it moves blocks of the CPU's memory, and this worker's are not shared")
        return MemfdExport(node.incarnation, engine.layout, engine.memory)
    if kind == "cuda_ipc":
        return CudaIpcExport(node.incarnation, _card_cache(engine))
    if kind == "nixl":
        nixl.available()
        return nixl.NixlExport(_agent(engine, node), layout_digest(engine.layout))
    raise NoPath("it is not built")


def _agent(engine: Engine, node: Node) -> nixl.AgentOnDemand:
    cache = engine.runner.cache
    region = nixl.card_region(cache) if engine.on_card else nixl.cpu_region(cache)
    return nixl.AgentOnDemand(node, engine.layout, region)


def _import(kind: str, engine: Engine, node: Node) -> Import:
    """Raises NoPath; without words where nobody would expect this kind."""
    if kind == "memfd":
        if engine.on_card:
            raise NoPath("it moves blocks of the CPU's memory, and this worker's are on a card")
        return MemfdImport(engine.layout)
    if kind == "nixl":
        nixl.available()
        return nixl.NixlImport(_agent(engine, node), layout_digest(engine.layout))
    if kind == "cuda_ipc":
        return CudaIpcImport(_card_cache(engine))
    raise NoPath("it is not built")


def _card_cache(engine: Engine) -> CardCache:
    if engine.ahead is None:
        raise NoPath("it moves blocks of a card's memory, and this worker's are in the CPU's")
    return engine.ahead.cache
