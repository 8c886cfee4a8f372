"""Both worker services over real gRPC on loopback, with FakeRunners: a request goes from prompt to last token."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
import torch
from emulated_gpu import EmulatedGpu

from decode_service.config import ROLE as DECODE
from decode_service.servicer import DecodeServicer
from engine.backend.cpu import CPUBackend
from engine.config import EngineConfig, ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_runner import CudaRunner
from engine.fake_runner import FakeRunner, fake_tokens
from engine.kv_cache import KVCache, kv_layout
from engine.loader.random_shapes import SHAPES
from engine.loader.random_weights import random_tensors
from engine.messages import (
    Cancel,
    DecodeStart,
    Failed,
    FirstToken,
    PrefillAccepted,
    PrefillStart,
    Reason,
    RequestKey,
    RouterHello,
    StepBatch,
    Ticket,
    WorkerHello,
)
from engine.models.llama import Llama
from engine.runner import ModelRunner
from engine.types import FinishReason, SamplingParams
from kvtransfer.paths import NoPath
from kvtransfer.startup import Assemble, Engine, Say
from kvtransfer.transports import nixl
from pagewire.local_engine import LocalEngine
from prefill_service.config import ROLE as PREFILL
from prefill_service.servicer import PrefillServicer
from protos import worker_pb2_grpc
from wire import codec
from wire.channel import open_channel, open_server
from wire.options import Role, WorkerOptions, parse
from wire.ports import bind
from wire.security import Security
from wire.session import Outbound, SessionOver, attach
from wire.worker import CannotStart

BLOCKS = 32


def fake_engine(options: WorkerOptions, say: Say) -> Engine:
    runner = FakeRunner(16, BLOCKS, step_seconds=0.002)
    config = EngineConfig(block_size=16, num_blocks=BLOCKS, max_num_batched_tokens=64)
    return Engine(runner, config, runner.layout, "fake")


class Link:
    """A router's session to one worker, which keeps what it hears."""

    def __init__(self, role: Role, channel: grpc.aio.Channel) -> None:
        prefill = role is PREFILL
        stub: Any = worker_pb2_grpc.PrefillServiceStub if prefill else worker_pb2_grpc.DecodeServiceStub
        from_pb: Any = codec.prefill_event_from_pb if prefill else codec.decode_event_from_pb
        to_pb: Any = codec.prefill_command_to_pb if prefill else codec.decode_command_to_pb
        self.outbound: Outbound[Any] = Outbound()
        self.events: list[Any] = []
        hello = RouterHello("r", 1, 1)
        self.task = asyncio.create_task(
            attach(stub(channel).Attach, hello, self.outbound, self._greeted, self.events.append, from_pb, to_pb)
        )
        self.hello: WorkerHello | None = None

    def _greeted(self, hello: WorkerHello) -> None:
        self.hello = hello

    def of(self, kind: Any, request: int) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.key.request == request]

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, SessionOver):
            await self.task


class Cluster:
    """One prefill and one decode worker in this process, and a router's sessions to both."""

    prefill: PrefillServicer
    decode: DecodeServicer
    p: Link
    d: Link

    def start(self, request: int, prompt: list[int], max_tokens: int, until_index: int = 1000) -> SamplingParams:
        params = SamplingParams(temperature=0, seed=1, max_tokens=max_tokens)
        self.p.outbound.put(PrefillStart(RequestKey(request, 1), prompt, 0, params, 30.0, 0.0))
        return params

    async def ticket(self, request: int) -> Ticket:
        await until(lambda: bool(self.p.of(PrefillAccepted, request)))
        ticket: Ticket = self.p.of(PrefillAccepted, request)[0].ticket
        return ticket

    async def place(self, request: int, prompt: list[int], params: SamplingParams) -> None:
        key, ticket = RequestKey(request, 1, 1), await self.ticket(request)
        self.d.outbound.put(DecodeStart(key, ticket, prompt, 0, params, 30.0, 0.0, 1000))

    def tokens(self, request: int) -> list[int]:
        rows = [row for step in self.d.events if isinstance(step, StepBatch) for row in step.rows]
        first = [event.token for event in self.d.of(FirstToken, request)]
        return [token.token_id for token in first + [row.token for row in rows if row.key.request == request]]

    def finish(self, request: int) -> FinishReason | None:
        steps = [step for step in self.d.events if isinstance(step, StepBatch)]
        found = [finish.reason for step in steps for finish in step.finishes if finish.key.request == request]
        return found[0] if found else None

    @property
    def idle(self) -> bool:
        drivers = (self.prefill._driver, self.decode._driver)
        return all(driver is not None and driver.core.idle for driver in drivers)

    def audit(self) -> None:
        for driver in (self.prefill._driver, self.decode._driver):
            assert driver is not None
            driver.core.audit()


@contextlib.asynccontextmanager
async def cluster(make: Assemble = fake_engine) -> AsyncIterator[Cluster]:
    it = Cluster()
    it.prefill = PrefillServicer(parse(PREFILL, ["--model", "fake"], {}), make)
    it.decode = DecodeServicer(parse(DECODE, ["--model", "fake"], {}), make)
    servers, channels, tasks = [], [], []
    stages: tuple[PrefillServicer | DecodeServicer, ...] = (it.prefill, it.decode)
    for stage in stages:
        server = open_server(Security(), internal=True)
        stage.register(server)
        port = bind(server, "127.0.0.1", 0, Security())
        await server.start()
        await stage.load(f"127.0.0.1:{port}", lambda line: None)
        tasks.append(asyncio.create_task(stage.run()))
        servers.append(server)
        channels.append(open_channel(f"127.0.0.1:{port}", Security(), internal=True))
    it.p, it.d = Link(PREFILL, channels[0]), Link(DECODE, channels[1])
    try:
        yield it
        await until(lambda: it.idle)
        it.audit()
        assert not any(task.done() for task in tasks), "a worker stopped by itself"
    finally:
        await it.p.end()
        await it.d.end()
        for channel in channels:
            await channel.close()
        for stage in reversed(stages):
            await stage.close()
        for server in servers:
            await server.stop(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        await asyncio.sleep(0.005)


async def test_a_request_goes_from_prompt_to_last_token_over_both_services() -> None:
    prompt = list(range(100))
    async with cluster() as it:
        params = it.start(1, prompt, max_tokens=20)
        await it.place(1, prompt, params)
        await until(lambda: it.finish(1) is not None)
        assert it.tokens(1) == fake_tokens(prompt, 20)
        assert it.finish(1) is FinishReason.LENGTH


async def test_a_ticket_that_names_the_decode_worker_itself_is_refused_by_name_and_no_other_request_hurt() -> None:
    prompt = list(range(40))
    async with cluster() as it:
        await until(lambda: it.d.hello is not None)
        assert it.d.hello is not None
        own = Ticket(9, it.d.hello.node, len(prompt), 3, 60.0)
        params = SamplingParams(temperature=0, seed=1, max_tokens=5)
        it.d.outbound.put(DecodeStart(RequestKey(7, 1, 1), own, prompt, 0, params, 30.0, 0.0, 1000))
        await until(lambda: bool(it.d.of(Failed, 7)))
        (failed,) = it.d.of(Failed, 7)
        assert failed.reason is Reason.COPY_FAILED and failed.resumable
        assert failed.facts["cause"] == "its ticket names this worker, which lends no blocks"
        params = it.start(1, prompt, max_tokens=5)
        await it.place(1, prompt, params)
        await until(lambda: it.finish(1) is not None)
        assert it.tokens(1) == fake_tokens(prompt, 5)


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
async def test_a_worker_whose_only_path_is_broken_does_not_start_and_says_why(
    kind: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise NoPath("it cannot be loaded: libucp.so.0: no such file")

    monkeypatch.setattr(nixl, "available", lambda: None)
    monkeypatch.setattr(nixl, "_load", broken)
    options = parse(kind, ["--model", "fake", "--transport", "nixl"], {})
    stage = PrefillServicer(options, fake_engine) if kind is PREFILL else DecodeServicer(options, fake_engine)
    try:
        with pytest.raises(CannotStart, match=r"--transport nixl cannot be had here: .* libucp.so.0"):
            await stage.load("127.0.0.1:1", lambda line: None)
    finally:
        await stage.close()


async def test_many_requests_share_the_workers() -> None:
    async with cluster() as it:
        prompts = {request: list(range(request, request + 10 + 7 * request)) for request in range(1, 9)}
        for request, prompt in prompts.items():
            params = it.start(request, prompt, max_tokens=5 + request)
            await it.place(request, prompt, params)
        for request, prompt in prompts.items():
            await until(lambda request=request: it.finish(request) is not None)  # type: ignore[misc]
            assert it.tokens(request) == fake_tokens(prompt, 5 + request)


async def test_a_cancel_at_both_workers_leaves_nothing_behind() -> None:
    prompt = list(range(60))
    async with cluster() as it:
        params = it.start(1, prompt, max_tokens=400)
        await it.place(1, prompt, params)
        await until(lambda: len(it.tokens(1)) > 3)
        it.p.outbound.put(Cancel(RequestKey(1, 1)))
        it.d.outbound.put(Cancel(RequestKey(1, 1, 1)))


async def test_a_decode_worker_that_drains_hands_its_requests_back_when_grace_ends() -> None:
    prompt = list(range(60))
    async with cluster() as it:
        params = it.start(1, prompt, max_tokens=400)
        await it.place(1, prompt, params)
        await until(lambda: len(it.tokens(1)) > 3)
        await it.decode.drain(0.3)
        await until(lambda: bool(it.d.of(Failed, 1)))
        (failed,) = it.d.of(Failed, 1)
        assert failed.reason is Reason.DRAINING and failed.resumable
        tokens = it.tokens(1)
        assert tokens == fake_tokens(prompt, len(tokens))
        with pytest.raises(SessionOver):
            await asyncio.wait_for(it.d.task, 30)


async def test_a_prefill_worker_that_goes_away_fails_the_pull_and_the_request_can_be_resumed() -> None:
    prompt = list(range(60))
    async with cluster() as it:
        params = it.start(1, prompt, max_tokens=400)
        ticket = await it.ticket(1)
        stale = Ticket(**{name: getattr(ticket, name) for name in ticket.__slots__} | {"id": ticket.id ^ 1})
        it.d.outbound.put(DecodeStart(RequestKey(1, 1, 1), stale, prompt, 0, params, 30.0, 0.0, 1000))
        await until(lambda: bool(it.d.of(Failed, 1)))
        assert it.d.of(Failed, 1)[0].reason is Reason.STALE_TICKET and it.d.of(Failed, 1)[0].resumable
        it.p.outbound.put(Cancel(RequestKey(1, 1)))


# ---- workers on a card ----------------------------------------------------------------------------------------------


def tiny_weights() -> Llama:
    config = ModelConfig.from_dict(SHAPES["tiny"])
    return Llama(config, random_tensors(config, 0, torch.float32, lambda *_: None))


SPARE = 2  # blocks behind the pool's, for the probe


def emulated_engine(options: WorkerOptions, say: Say) -> Engine:
    gpu: Any = EmulatedGpu()
    weights, config = tiny_weights(), EngineConfig(block_size=16, num_blocks=BLOCKS, max_num_seqs=4, max_model_len=256)
    cache = CudaKVCache(kv_layout(weights.config, b"m", "float32", 16, ""), BLOCKS + SPARE, gpu)
    runner = CudaRunner(weights, config, cache, gpu, graphs=options.role is DECODE)
    return Engine(runner, config, cache.layout, "emulated", ahead=runner)


def greedy_tokens(prompt: list[int], count: int) -> list[int]:
    weights, config = tiny_weights(), EngineConfig(block_size=16, num_blocks=BLOCKS, max_model_len=256)
    cache = KVCache(kv_layout(weights.config, b"m", "float32", 16, ""), BLOCKS)
    engine = LocalEngine(ModelRunner(weights, config, cache, CPUBackend()), config)
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count))
    found: list[int] = []
    while engine.has_work:
        found += [token.token_id for _, token, _ in engine.step()]
    return found


async def test_blocks_travel_between_cards_and_steps_run_ahead_of_their_reports() -> None:
    prompts = {1: list(range(5, 45)), 2: list(range(100, 117))}
    async with cluster(emulated_engine) as it:
        for request, prompt in prompts.items():
            await it.place(request, prompt, it.start(request, prompt, 20))
        await until(lambda: all(it.finish(request) is not None for request in prompts), 20.0)
        for request, prompt in prompts.items():
            expected = greedy_tokens(prompt, 20)
            assert it.tokens(request) == expected
        assert it.decode._peers is not None
        (path,) = it.decode._peers.paths()
        assert (path.transport, path.transfers) == ("cuda_ipc", 2), path
        await until(lambda: it.idle)
        it.audit()


async def test_a_step_that_fails_on_a_card_ends_its_requests_and_no_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = CudaRunner.collect
    broken = [True]

    def fails_once(self: CudaRunner, launched: Any) -> Any:
        if launched.graph is not None and broken and launched.step == 1:
            broken.clear()
            raise RuntimeError("an illegal thing happened")
        return collect(self, launched)

    monkeypatch.setattr(CudaRunner, "collect", fails_once)
    async with cluster(emulated_engine) as it:
        prompt = list(range(5, 25))
        await it.place(1, prompt, it.start(1, prompt, 20))
        await until(lambda: bool(it.d.of(Failed, 1)), 20.0)
        await it.place(2, prompt, it.start(2, prompt, 20))
        await until(lambda: it.finish(2) is not None, 20.0)
        assert it.tokens(2) == greedy_tokens(prompt, 20)
        await until(lambda: it.idle)
        it.audit()
