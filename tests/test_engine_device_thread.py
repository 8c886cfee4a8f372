"""The device thread runs one thing at a time, and the loop neither sleeps through work nor hides a failure."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from engine.batch import Batch, Row, StepOutput
from engine.device_thread import DeviceThread, ahead_loop, engine_loop


async def test_functions_run_one_at_a_time_in_order_on_one_other_thread() -> None:
    device = DeviceThread()
    seen: list[tuple[int, int]] = []

    def work(number: int) -> int:
        time.sleep(0.002 * (5 - number))
        seen.append((number, threading.get_ident()))
        return number * 2

    assert await asyncio.gather(*(device.run(work, i) for i in range(5))) == [0, 2, 4, 6, 8]
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    device.close()


async def test_an_exception_reaches_the_caller_and_the_thread_goes_on() -> None:
    device = DeviceThread()
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 // 0)
    assert await device.run(lambda: 7) == 7
    device.close()


async def test_close_waits_for_what_has_begun_even_if_its_caller_was_cancelled() -> None:
    device = DeviceThread()
    began, done = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        time.sleep(0.05)
        done.set()

    task = asyncio.create_task(device.run(work))
    while not began.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    device.close()
    assert done.is_set()


def _output(batch: Batch) -> StepOutput:
    return StepOutput([None] * len(batch.rows), [[]] * len(batch.rows), [], 0.0)


async def test_the_loop_sleeps_without_work_and_wakes_for_it() -> None:
    work: list[Batch] = []
    asked = 0
    finished: list[StepOutput] = []
    wake = asyncio.Event()

    def next_batch() -> Batch | None:
        nonlocal asked
        asked += 1
        return work.pop(0) if work else None

    async def step(batch: Batch) -> StepOutput:
        await asyncio.sleep(0)
        return _output(batch)

    loop = asyncio.create_task(engine_loop(next_batch, step, finished.append, wake))
    await asyncio.sleep(0.02)
    assert asked == 1, "the loop must not poll"
    work.extend(Batch([Row(0, [1], 0, [0])]) for _ in range(3))
    wake.set()
    await asyncio.sleep(0.02)
    assert len(finished) == 3
    assert asked == 5
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


async def test_work_that_arrives_while_the_loop_decides_to_sleep_is_not_missed() -> None:
    wake = asyncio.Event()
    answers: list[Batch | None] = [None, Batch()]
    done = asyncio.Event()

    def next_batch() -> Batch | None:
        if not answers:
            return None
        wake.set()  # a message that came in the same turn
        return answers.pop(0)

    async def step(batch: Batch) -> StepOutput:
        return _output(batch)

    def on_step(output: StepOutput) -> None:
        done.set()

    loop = asyncio.create_task(engine_loop(next_batch, step, on_step, wake))
    await asyncio.wait_for(done.wait(), 1)
    loop.cancel()


async def test_a_failed_step_ends_the_loop_with_its_exception() -> None:
    async def step(batch: Batch) -> StepOutput:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        await engine_loop(lambda: Batch(), step, lambda output: None, asyncio.Event())


async def test_a_runner_that_takes_two_steps_has_the_next_before_the_last_is_read_and_in_order() -> None:
    batches = [Batch([Row(number, [1], 0, [0])]) for number in range(5)]
    waiting, launched, events = list(batches), 0, list[str]()
    done = asyncio.Event()

    async def turn(batch: Batch | None, oldest: Batch | None) -> tuple[Batch | None, StepOutput | None]:
        nonlocal launched
        if batch is not None:
            launched += 1
            events.append(f"submit {batch.rows[0].slot} of {launched}")
        if oldest is not None:
            launched -= 1
            events.append(f"collect {oldest.rows[0].slot}")
        return batch, None if oldest is None else _output(oldest)

    def on_step(output: StepOutput) -> None:
        if not waiting and not launched:
            done.set()

    loop = asyncio.create_task(
        ahead_loop(lambda: waiting.pop(0) if waiting else None, turn, on_step, asyncio.Event(), 2)
    )
    await asyncio.wait_for(done.wait(), 1)
    loop.cancel()
    assert events[:4] == ["submit 0 of 1", "submit 1 of 2", "collect 0", "submit 2 of 2"]
    assert [event for event in events if "collect" in event] == [f"collect {number}" for number in range(5)]
