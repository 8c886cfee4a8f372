"""When a call hears of its tokens: at once, unless many streams are open and its last tokens came a moment ago."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from engine.types import FinishReason, SamplingParams, Token
from router import patience
from router.actions import Emit, End, Outcome, RouterRequest, Times
from router.admission import RouterConfig
from router.dispatch import Dispatcher
from router.driver import MOST_HELD, MOST_HOLD_S, Call, Driver
from router.patience import Patience, TooSlow

ENDED = End(1, Outcome(FinishReason.LENGTH, 1, 9, 0, Times()))


def word(index: int) -> Emit:
    return Emit(1, (Token(index, 5),))


def one_of(open_calls: int) -> Call:
    driver = Driver(Dispatcher(RouterConfig(max_concurrent_requests=1000), random.Random(1)), lambda action: None)
    calls = [Call(driver) for _ in range(open_calls)]
    for call in calls:
        call.submit(RouterRequest((1, 2), SamplingParams(max_tokens=9), 60.0))
    return calls[0]


async def seconds_to(call: Call, events: int) -> float:
    began = time.monotonic()
    assert len(await call.events()) == events
    return time.monotonic() - began


async def test_among_many_streams_tokens_that_follow_closely_come_together_and_never_late() -> None:
    call = one_of(300)
    call.put(0, word(0))
    assert await seconds_to(call, 1) < MOST_HOLD_S / 2, "nothing came a moment before it"
    call.put(0, word(1))
    asyncio.get_running_loop().call_later(MOST_HOLD_S / 3, call.put, 0, word(2))
    assert MOST_HOLD_S / 2 < await seconds_to(call, 2) < MOST_HOLD_S + 0.2
    await asyncio.sleep(1.5 * MOST_HOLD_S)
    call.put(0, word(3))
    assert await seconds_to(call, 1) < MOST_HOLD_S / 2


async def test_a_call_that_was_read_late_holds_its_next_tokens_for_less() -> None:
    call = one_of(300)
    call.put(0, word(0))
    await call.events()
    call.put(0, word(1))
    await asyncio.sleep(1.8 * MOST_HOLD_S)  # other streams had their turn first
    await call.events()
    call.put(0, word(2))
    assert await seconds_to(call, 1) < MOST_HOLD_S / 2
    call.put(0, word(3))
    assert await seconds_to(call, 1) > MOST_HOLD_S / 2, "it was read in time"


async def test_an_end_and_many_tokens_wait_for_nothing() -> None:
    call = one_of(300)
    call.put(0, word(0))
    await call.events()
    call.put(0, word(1))
    call.put(0, ENDED)
    assert await seconds_to(call, 2) < MOST_HOLD_S / 2
    for index in range(MOST_HELD):
        call.put(0, word(index))
    assert await seconds_to(call, MOST_HELD) < MOST_HOLD_S / 2


async def test_a_stream_that_is_alone_hears_of_each_token_at_once() -> None:
    call = one_of(1)
    for index in range(20):
        call.put(0, word(index))
        assert await seconds_to(call, 1) < MOST_HOLD_S / 2


async def test_a_client_that_takes_nothing_ends_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MOST_WRITE_S", 0.1)
    with pytest.raises(TooSlow, match="read nothing"):
        async with Patience() as held:
            await held.during(asyncio.sleep(10))


async def test_writes_that_are_taken_may_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MOST_WRITE_S", 0.1)
    async with Patience() as held:
        for _ in range(5):
            await held.during(asyncio.sleep(0.05))
        await asyncio.sleep(0.3)  # nothing is written meanwhile
