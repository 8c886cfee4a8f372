"""Tasks that are ended with their owner: nothing is left, and nobody's own cancellation is lost."""

from __future__ import annotations

import asyncio

import pytest

from wire.tasks import cancel_all


async def slow_to_end(ending: asyncio.Event) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        ending.set()
        await asyncio.sleep(0.05)


async def test_a_cancel_that_comes_while_others_are_being_ended_is_not_swallowed() -> None:
    ending = asyncio.Event()
    inner = asyncio.create_task(slow_to_end(ending))

    async def owner() -> None:
        await asyncio.sleep(0)
        await cancel_all([inner])
        await asyncio.sleep(60)  # where a session's next try would begin

    task = asyncio.create_task(owner())
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)
    await asyncio.wait([inner])


async def test_it_returns_when_all_have_ended_and_raises_what_one_failed_with() -> None:
    async def fails() -> None:
        raise ValueError("lost")

    tasks = [asyncio.create_task(slow_to_end(asyncio.Event())), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="lost"):
        await cancel_all(tasks)
    assert all(task.done() for task in tasks)
    await cancel_all([])
