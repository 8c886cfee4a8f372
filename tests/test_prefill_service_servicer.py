"""The prefill service over real gRPC on loopback, with a FakeRunner as its device."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from engine.batch import Batch, StepOutput
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.messages import (
    Cancel,
    Failed,
    FirstToken,
    PrefillAccepted,
    PrefillStart,
    Reason,
    RequestKey,
    RouterHello,
    WorkerHello,
    WorkerLoad,
)
from engine.types import SamplingParams
from kvtransfer.startup import Engine, Say
from prefill_service.config import ROLE
from prefill_service.servicer import PrefillServicer
from protos import worker_pb2_grpc
from wire.channel import open_channel, open_server
from wire.codec import prefill_command_to_pb, prefill_event_from_pb
from wire.options import WorkerOptions, parse
from wire.ports import bind
from wire.security import Security
from wire.session import Outbound, SessionOver, attach

OPTIONS = parse(ROLE, ["--model", "fake", "--port", "0"], {})
PARAMS = SamplingParams(temperature=0, seed=1, max_tokens=4)
Event = TypeVar("Event")


class TouchyRunner(FakeRunner):
    """Raises for a prompt that holds token 666, as a bug in the engine would."""

    def step(self, batch: Batch) -> StepOutput:
        if any(666 in row.tokens for row in batch.rows):
            raise RuntimeError("token 666")
        return super().step(batch)


def fake_engine(options: WorkerOptions, say: Say) -> Engine:
    say("reading the fake")
    runner = TouchyRunner(16, 32)
    config = EngineConfig(block_size=16, num_blocks=32, max_num_batched_tokens=32)
    return Engine(runner, config, runner.layout, "fake")


class Router:
    """The router's half of one session, which keeps what it hears."""

    def __init__(self, channel: grpc.aio.Channel, session: int = 1, name: str = "r") -> None:
        self.outbound: Outbound[Any] = Outbound()
        self.hello: WorkerHello | None = None
        self.events: list[Any] = []
        self.heard = asyncio.Event()
        stub = worker_pb2_grpc.PrefillServiceStub(channel)
        hello = RouterHello(name, 1, session)
        self.task = asyncio.create_task(
            attach(
                stub.Attach,
                hello,
                self.outbound,
                self._on_hello,
                self._on_event,
                prefill_event_from_pb,
                prefill_command_to_pb,
            )
        )

    def _on_hello(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.heard.set()

    def _on_event(self, event: Any) -> None:
        self.events.append(event)
        self.heard.set()

    def start(self, request: int, tokens: list[int]) -> None:
        self.outbound.put(PrefillStart(RequestKey(request, 1), tuple(tokens), 0, PARAMS, 30.0, 0.0))

    async def get(self, kind: type[Event], matches: Callable[[Any], bool] = lambda event: True) -> Event:
        """The first event of that kind, once it is there."""
        async with asyncio.timeout(30):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and matches(event):
                        return event
                self.heard.clear()
                await self.heard.wait()

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, SessionOver):
            await self.task


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[PrefillServicer, grpc.aio.Channel]]:
    """A prefill worker in this process, loaded and running."""
    servicer = PrefillServicer(OPTIONS, fake_engine)
    server = open_server(Security(), internal=True)
    servicer.register(server)
    port = bind(server, "127.0.0.1", 0, Security())
    await server.start()
    await servicer.load(f"127.0.0.1:{port}", lambda line: None)
    running = asyncio.create_task(servicer.run())
    channel = open_channel(f"127.0.0.1:{port}", Security(), internal=True)
    try:
        yield servicer, channel
        assert not running.done(), "the worker stopped by itself"
    finally:
        await channel.close()
        await server.stop(1.0)
        running.cancel()
        await asyncio.wait([running])
        await servicer.close()


async def test_a_start_is_answered_by_a_ticket_and_the_first_token() -> None:
    async with serving() as (_, channel):
        router = Router(channel)
        router.start(7, list(range(40)))
        accepted = await router.get(PrefillAccepted)
        first = await router.get(FirstToken)
        assert accepted.ticket.num_blocks == 3 and accepted.key == first.key == RequestKey(7, 1)
        assert first.token.token_id == fake_tokens(list(range(40)), 1)[0]
        assert router.hello is not None and router.hello.total_blocks == 32
        assert accepted.ticket.owner == router.hello.node
        await router.end()


async def test_a_session_that_breaks_gives_all_its_blocks_back() -> None:
    async with serving() as (servicer, channel):
        router = Router(channel)
        router.start(7, list(range(40)))
        await router.get(FirstToken)
        await router.end()
        assert servicer._driver is not None
        await until(lambda: servicer._driver is not None and servicer._driver.core.idle)
        servicer._driver.core.audit()


async def test_two_routers_may_use_the_same_session_number() -> None:
    async with serving() as (_, channel):
        one, two = Router(channel, session=1, name="one"), Router(channel, session=1, name="two")
        one.start(7, list(range(20)))
        two.start(7, list(range(30)))
        assert (await one.get(FirstToken)).token.token_id == fake_tokens(list(range(20)), 1)[0]
        assert (await two.get(FirstToken)).token.token_id == fake_tokens(list(range(30)), 1)[0]
        await one.end()
        await two.end()


async def test_a_newer_session_of_a_router_ends_its_older_one() -> None:
    async with serving() as (_, channel):
        old = Router(channel, session=1)
        await old.get(WorkerLoad)
        new = Router(channel, session=2)
        with pytest.raises(SessionOver):
            await asyncio.wait_for(old.task, 30)
        new.start(1, [1, 2, 3])
        await new.get(FirstToken)
        await new.end()


async def test_a_step_that_raises_fails_its_requests_and_the_next_one_is_served() -> None:
    async with serving() as (_, channel):
        router = Router(channel)
        router.start(1, [666] * 5)
        failed = await router.get(Failed)
        assert failed.reason is Reason.INTERNAL and failed.facts["error_id"] and not failed.resumable
        router.start(2, [1, 2, 3])
        assert (await router.get(FirstToken)).key.request == 2
        await router.end()


async def test_a_cancelled_request_gives_its_blocks_back() -> None:
    async with serving() as (servicer, channel):
        router = Router(channel)
        router.start(1, list(range(40)))
        await router.get(FirstToken)
        router.outbound.put(Cancel(RequestKey(1, 1)))
        await until(lambda: servicer._driver is not None and servicer._driver.core.idle)
        await router.end()


async def test_a_session_before_the_model_is_loaded_is_refused_as_unavailable() -> None:
    servicer = PrefillServicer(OPTIONS, fake_engine)
    server = open_server(Security(), internal=True)
    servicer.register(server)
    port = bind(server, "127.0.0.1", 0, Security())
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", Security(), internal=True)
    router = Router(channel)
    with pytest.raises(SessionOver, match="UNAVAILABLE: the model is still loading"):
        await router.task
    await channel.close()
    await server.stop(None)
    await servicer.close()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        await asyncio.sleep(0.01)
