"""The one thread that touches the device, and the loop that keeps it busy.

The event loop and this thread exchange values only: a Batch goes in, a StepOutput comes out. Nothing here knows
what a step does. The loop never waits on the network: between two steps it runs only plain Python.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.batch import Batch, StepOutput

T = TypeVar("T")
L = TypeVar("L")  # a step that was launched


class DeviceThread:
    """Runs functions one after the other on one thread of its own."""

    def __init__(self, name: str = "device") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """fn(*args) on the thread. If the caller is cancelled, a function that has begun still runs to its end."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, fn, *args)

    def close(self) -> None:
        """Drops what has not begun and waits for what has: afterwards nothing writes to the cache."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def engine_loop(
    next_batch: Callable[[], Batch | None],
    step: Callable[[Batch], Awaitable[StepOutput]],
    on_step: Callable[[StepOutput], None],
    wake: asyncio.Event,
) -> None:
    """Runs steps for ever, one at a time; sleeps on `wake` while there is nothing to do.

    Whoever makes work sets `wake`. An exception from any of the three ends the loop and reaches its awaiter.
    """
    while True:
        wake.clear()  # before asking: work that arrives after next_batch() said None must wake us
        batch = next_batch()
        if batch is None:
            await wake.wait()
        else:
            on_step(await step(batch))


async def ahead_loop(
    next_batch: Callable[[], Batch | None],
    turn: Callable[[Batch | None, L | None], Awaitable[tuple[L | None, StepOutput | None]]],
    on_step: Callable[[StepOutput], None],
    wake: asyncio.Event,
    depth: int,
) -> None:
    """engine_loop for a runner that takes `depth` steps before the first is read: they are reported in order.

    `turn` launches a step, where it is given one, and then reads one that was launched: together, because each way to
    the device's thread and back costs as much as the plain Python of a small step.
    """
    launched: deque[L] = deque()
    while True:
        wake.clear()
        batch = next_batch()
        full = len(launched) + (batch is not None) == depth
        oldest = launched.popleft() if launched and (full or batch is None) else None
        if batch is None and oldest is None:
            await wake.wait()
            continue
        newest, output = await turn(batch, oldest)
        if newest is not None:
            launched.append(newest)
        if output is not None:
            on_step(output)
