"""The model's directory, made ready by a child process, and what the router says of it meanwhile.

`python -m engine.loader prepare NAME` finds, checks, converts and caches a model and prints one JSON line per step.
It may load torch, which the router never does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config import CannotServe
from router.status import RequestError
from router.text.model import TextModel
from wire.logs import get_logger

log = get_logger("preparing")

STOP_S = 2.0  # how long a conversion that is told to stop may take to clean up


@dataclass(frozen=True, slots=True)
class Prepared:
    """`digest` is what a worker of the same model reports in its layout."""

    name: str
    directory: Path
    digest: bytes


class ServedModel:
    """The model, once it is there. Until then `get` refuses with what is going on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = "starting"
        self._model: TextModel | None = None

    @property
    def ready(self) -> bool:
        return self._model is not None

    def progress(self, phase: str) -> None:
        self._phase = phase

    def set(self, model: TextModel) -> None:
        self._model = model

    def get(self) -> TextModel:
        if self._model is None:
            raise RequestError(
                "UNAVAILABLE",
                f"{self._name} is being prepared ({self._phase}): try again in a few seconds",
                reason="PREPARING",
                facts={"model": self._name, "phase": self._phase},
                retry_after=2.0,
            )
        return self._model

    def name(self) -> str:
        """What clients call it, or what it was started as, as long as that is not known."""
        return self._name if self._model is None else self._model.names[0]

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


async def prepare(name: str, cache_dir: Path | None, progress: Callable[[str], None]) -> Prepared:
    """Waits until the model is a local directory. Raises CannotServe."""
    argv = [sys.executable, "-m", "engine.loader", "prepare", name]
    if cache_dir is not None:
        argv += ["--cache-dir", str(cache_dir)]
    child = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, limit=2**20
    )
    try:
        last = await _follow(child, progress)
        code = await child.wait()
    finally:
        if child.returncode is None:
            await _stop(child)
    if code != 0:
        raise CannotServe(str(last.get("error") or f"preparing {name} failed: its process exited with status {code}"))
    return Prepared(str(last["name"]), Path(last["dir"]), bytes.fromhex(last["digest"]))


async def _follow(child: asyncio.subprocess.Process, progress: Callable[[str], None]) -> dict[str, Any]:
    """Reports every step and returns the last line."""
    assert child.stdout is not None, "the child was started with a pipe"
    last: dict[str, Any] = {}
    shown = ""
    async for line in child.stdout:
        try:
            last = json.loads(line)
        except ValueError:
            continue  # a library's own words
        if phase := last.get("phase"):
            progress(f"{phase}, {float(last.get('fraction', 0)):.0%}")
            if phase != shown:
                shown = phase
                log.info("preparing", phase=phase)
    return last


async def _stop(child: asyncio.subprocess.Process) -> None:
    child.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
