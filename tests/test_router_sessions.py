"""The router's sessions to real worker services with FakeRunners: requests survive deaths, names find workers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest
from router_front import make_model_dir, until

from decode_service.config import ROLE as DECODE
from decode_service.servicer import DecodeServicer
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.types import SamplingParams
from kvtransfer.startup import Engine, Say
from pagewire.client import AsyncClient, PagewireError
from prefill_service.config import ROLE as PREFILL
from prefill_service.servicer import PrefillServicer
from router import border, sessions
from router.admission import RouterConfig
from router.dispatch import Dispatcher
from router.driver import Driver
from router.front import Deadlines, Front
from router.metrics import Counts
from router.servicer import GenerationService
from router.sessions import Sessions
from router.text.model import TextModel
from router.workers import Role
from wire.channel import open_server
from wire.options import WorkerOptions, parse
from wire.ports import bind
from wire.security import Security

VOCABULARY = 260
BLOCKS = 40
FAKE_MODEL = FakeRunner(16, 2).layout.model_digest
GREEDY = SamplingParams(temperature=0, max_tokens=60)


def fake_engine(options: WorkerOptions, say: Say) -> Engine:
    runner = FakeRunner(16, BLOCKS, vocab_size=VOCABULARY, step_seconds=0.004)
    config = EngineConfig(block_size=16, num_blocks=BLOCKS, max_num_batched_tokens=64, max_model_len=512)
    return Engine(runner, config, runner.layout, "fake")


@dataclass
class Stage:
    """One worker service in this process; `die` cuts every connection at once."""

    servicer: PrefillServicer | DecodeServicer
    server: grpc.aio.Server
    port: int
    task: asyncio.Task[None]

    @classmethod
    async def start(
        cls, kind: type[PrefillServicer] | type[DecodeServicer], port: int = 0, host: str = "127.0.0.1"
    ) -> Stage:
        servicer = kind(parse(PREFILL if kind is PrefillServicer else DECODE, ["--model", "fake"], {}), fake_engine)
        server = open_server(Security(), internal=True)
        servicer.register(server)
        port = bind(server, host, port, Security(insecure=True))
        await server.start()
        await servicer.load(f"127.0.0.1:{port}", lambda line: None)
        return cls(servicer, server, port, asyncio.create_task(servicer.run()))

    async def die(self) -> None:
        await self.server.stop(None)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.servicer.close()


@dataclass
class Cluster:
    address: str
    driver: Driver
    sessions: Sessions
    stages: list[Stage] = field(default_factory=list)

    def eligible(self, role: Role) -> int:
        return len(self.driver.dispatcher.workers.eligible(role))


@contextlib.asynccontextmanager
async def cluster(
    directory: Path, prefill: int = 1, decode: int = 1, digest: bytes = FAKE_MODEL
) -> AsyncIterator[Cluster]:
    stages = [await Stage.start(PrefillServicer) for _ in range(prefill)]
    stages += [await Stage.start(DecodeServicer) for _ in range(decode)]
    targets = [(Role.PREFILL, f"localhost:{stage.port}") for stage in stages[:prefill]]
    targets += [(Role.DECODE, f"127.0.0.1:{stage.port}") for stage in stages[prefill:]]
    model = TextModel(("fake",), directory)
    dispatcher = Dispatcher(RouterConfig(no_worker_grace=0.3, restart_grace=3.0), random.Random(1), time.monotonic())
    links = Sessions("test", targets, Security())
    driver = Driver(dispatcher, links.send)
    server = open_server(Security(), internal=False)
    service = GenerationService(Front(lambda: model, driver, Counts(), Deadlines()))
    border.add_to_server(lambda: service, server)
    port = bind(server, "127.0.0.1", 0, Security())
    await server.start()
    dispatcher.workers.model_digest = digest
    tasks = [asyncio.create_task(driver.run()), asyncio.create_task(links.run(driver))]
    running = Cluster(f"127.0.0.1:{port}", driver, links, stages)
    try:
        yield running
        await until(lambda: dispatcher.idle)
        dispatcher.audit()
    finally:
        await server.stop(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stage in running.stages:
            await stage.die()
        model.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


async def test_a_request_runs_over_real_sessions_and_gives_the_workers_tokens(directory: Path) -> None:
    async with cluster(directory) as it, AsyncClient(it.address) as client:
        await until(it.driver.dispatcher.workers.ready, 5)
        prompts = [[number, *range(3 * number)] for number in range(1, 9)]
        results = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == fake_tokens(prompt, 60, VOCABULARY)


async def test_a_decode_worker_that_dies_in_mid_stream_costs_no_token(directory: Path) -> None:
    async with cluster(directory, decode=2) as it, AsyncClient(it.address) as client:
        await until(lambda: it.eligible(Role.DECODE) == 2 and it.eligible(Role.PREFILL) == 1, 5)
        got: list[int] = []
        async for delta in client.stream([1, 2, 3], GREEDY):
            got += delta.token_ids
            if len(got) == 20:
                (busy,) = [worker for worker in it.driver.dispatcher.workers.all(Role.DECODE) if worker.jobs]
                (stage,) = [stage for stage in it.stages if stage.port == int(busy.address.split(":")[1])]
                it.stages.remove(stage)
                await stage.die()
        assert got == fake_tokens([1, 2, 3], 60, VOCABULARY)


async def test_a_worker_that_comes_back_is_attached_again(directory: Path) -> None:
    async with cluster(directory) as it, AsyncClient(it.address) as client:
        await until(it.driver.dispatcher.workers.ready, 5)
        prefill = it.stages.pop(0)
        await prefill.die()
        await until(lambda: it.eligible(Role.PREFILL) == 0, 5)
        waiting = asyncio.create_task(client.generate([5], GREEDY))
        await asyncio.sleep(0.2)
        it.stages.append(await Stage.start(PrefillServicer, prefill.port))
        assert list((await waiting).token_ids) == fake_tokens([5], 60, VOCABULARY)


async def test_a_worker_of_another_model_is_not_used_and_the_client_is_told(directory: Path) -> None:
    async with cluster(directory, digest=b"another") as it, AsyncClient(it.address) as client:
        with pytest.raises(PagewireError) as caught:
            await client.generate([1], GREEDY)
        assert caught.value.code == "UNAVAILABLE"
        assert "no prefill worker takes work" in str(caught.value)
        assert f"model_digest is {b'fake'.hex()}, not {b'another'.hex()}" in str(caught.value)
        info = await client.server_info()
        assert len(info.workers) == 2 and not any(worker.accepting for worker in info.workers)
        assert info.prefill_workers == info.decode_workers == 0


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What decode.example leads to; it is looked up all the time."""
    found: set[str] = set()

    async def addresses(target: str) -> frozenset[str]:
        return frozenset(found) if target.startswith("decode.example") else await look_up(target)

    look_up = sessions._addresses
    monkeypatch.setattr(sessions, "_addresses", addresses)
    monkeypatch.setattr(sessions, "RESOLVE_S", 0.05)
    return found


async def test_a_name_is_looked_up_again_and_each_of_its_addresses_is_a_worker(
    directory: Path, named: set[str]
) -> None:
    spare = await Stage.start(DecodeServicer)
    async with cluster(directory) as it:
        it.stages.append(spare)
        it.sessions._targets += ((Role.DECODE, "decode.example:1"),)
        await until(lambda: it.eligible(Role.DECODE) == 1, 5)
        named.add(f"127.0.0.1:{spare.port}")
        await until(lambda: it.eligible(Role.DECODE) == 2, 5)


async def test_two_names_of_one_worker_make_one_session(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RESOLVE_S", 0.05)
    monkeypatch.setattr(sessions, "TWIN_S", 0.05)  # looks more often than the other one tries again
    async with cluster(directory, decode=0) as it, AsyncClient(it.address) as client:
        it.stages.append(await Stage.start(DecodeServicer, host="0.0.0.0"))
        port = it.stages[-1].port
        it.sessions._targets += ((Role.DECODE, f"127.0.0.1:{port}"), (Role.DECODE, f"127.0.0.2:{port}"))
        await until(it.driver.dispatcher.workers.ready, 5)
        await asyncio.sleep(0.8)  # the second one has tried and stays away
        opened = it.sessions._session
        assert opened <= 4, "prefill's, the first one's, the second one's, which ends that, and the first one's again"
        assert list((await client.generate([5], GREEDY)).token_ids) == fake_tokens([5], 60, VOCABULARY)
        await asyncio.sleep(0.5)
        assert it.eligible(Role.DECODE) == 1 and it.sessions._session == opened


async def test_a_second_name_takes_over_when_the_first_one_is_gone(
    directory: Path, named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "TWIN_S", 0.05)
    async with cluster(directory, decode=0) as it:
        it.stages.append(await Stage.start(DecodeServicer, host="0.0.0.0"))
        it.sessions._targets += ((Role.DECODE, "decode.example:1"),)
        both = [f"127.0.0.{i}:{it.stages[-1].port}" for i in (1, 2)]
        named.update(both)
        await until(it.driver.dispatcher.workers.ready, 5)
        await asyncio.sleep(0.8)
        (first,) = [address for role, address in it.sessions._outbound if role is Role.DECODE]
        named.discard(first)
        await asyncio.sleep(0.2)
        it.sessions._outbound[Role.DECODE, first].close()
        (second,) = {*both} - {first}
        await until(lambda: (Role.DECODE, second) in it.sessions._outbound and it.eligible(Role.DECODE) == 1, 5)


async def test_a_worker_that_is_named_for_the_other_role_too_keeps_the_session_that_it_has(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESOLVE_S", 0.05)
    monkeypatch.setattr(sessions, "TWIN_S", 0.05)
    async with cluster(directory, prefill=0, decode=0) as it:
        it.stages.append(await Stage.start(PrefillServicer, host="0.0.0.0"))
        both = [f"127.0.0.{i}:{it.stages[-1].port}" for i in (1, 2)]
        it.sessions._targets += tuple((role, address) for role in Role for address in both)
        await until(lambda: it.eligible(Role.PREFILL) == 1, 5)
        await asyncio.sleep(0.8)
        opened = dict(it.sessions._outbound)
        await asyncio.sleep(2)  # in which it is tried as a decode worker again and again
        assert len(opened) == 1 and it.sessions._outbound == opened


@pytest.mark.parametrize("target", ["[::1]:50061", "127.0.0.1:50061"])
async def test_addresses_stay_what_they_are(target: str) -> None:
    assert await sessions._addresses(target) == {target}
