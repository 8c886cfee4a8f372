"""Crowds that behave badly, on real processes: whoever behaves well gets an answer, and nothing is left behind.

Cancels at every moment, clients that all leave at once, readers that do not read, more requests than fit. The second
half has its own small cluster, with few seats, a short queue and little patience.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from cluster import Cluster, make_topology
from kill_workers import Answer, Stream, all_idle, request_for

from kvtransfer.transports.hands import NICE
from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc

VOCAB = 250
SEATS, RUNNING, QUEUED, PATIENCE = 16, 48, 16, 7.0
# A window that does not grow: what is not read stays at the server, and its writes wait.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))


def open_stream(channel: grpc.aio.Channel, request: gpb.GenerateStreamRequest) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request, timeout=60.0)


def connect(cluster: Cluster, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(cluster.address, options=[("grpc.use_local_subchannel_pool", 1), *options])


def memory(cluster: Cluster) -> dict[str, int]:
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in cluster.processes.items()}


@pytest.fixture
async def channels(cluster: Cluster) -> AsyncIterator[list[grpc.aio.Channel]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect(cluster)) for _ in range(4)]


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Cluster]:
    topology = make_topology(cache_dir=model_cache, max_num_seqs=SEATS, kv_memory="32MiB")
    cluster = Cluster(topology, tmp_path_factory.mktemp("small"))
    limits = ("--max-concurrent-requests", str(RUNNING), "--queue", str(QUEUED), "--slow-client", str(PATIENCE))
    router = cluster.programs["router"]
    cluster.programs["router"] = replace(router, argv=(*router.argv, *limits))
    try:
        cluster.start()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.kill_all()


async def nothing_is_left(cluster: Cluster, seconds: float) -> None:
    """In this time, counting the second until workers report."""
    assert await all_idle(cluster, seconds) == ""
    for name in cluster.programs:
        assert cluster.alive(name) and cluster.tracebacks(name) == [], cluster.log(name)


async def timed(channel: grpc.aio.Channel, request: gpb.GenerateStreamRequest) -> tuple[float, Answer]:
    started = time.monotonic()
    answer = await Stream(channel, request).whole()
    return time.monotonic() - started, answer


# ---- clients that leave -------------------------------------------------------------------------------------------


async def leave_somewhere(channel: grpc.aio.Channel, number: int, rng: random.Random) -> str:
    """Cancels before the call is out, while the prompt waits or is computed, or after some tokens."""
    call = open_stream(channel, request_for(number, rng.choice((5, 40, 400)), 200, VOCAB))
    try:
        match rng.randrange(4):
            case 0:
                await asyncio.sleep(0)
                return "at once"
            case 1:
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                return "early"
            case _:
                for _ in range(rng.randint(1, 60)):
                    if await call.read() is grpc.aio.EOF:
                        return "late"
                return "midway"
    finally:
        call.cancel()


async def test_after_500_cancels_every_block_is_back_and_the_next_request_is_served(
    cluster: Cluster, channels: list[grpc.aio.Channel]
) -> None:
    rng, gate = random.Random(1), asyncio.Semaphore(64)
    request = request_for(1, 40, 60, VOCAB)
    normal, expected = await timed(channels[0], request)

    async def one(number: int) -> str:
        async with gate:
            return await leave_somewhere(channels[number % 4], number, rng)

    left = Counter(await asyncio.gather(*(one(number) for number in range(500))))
    assert min(left["at once"], left["early"], left["midway"]) > 50, left
    took, answer = await timed(channels[0], request)
    assert answer == expected
    assert took < max(1.0, 3 * normal), f"{took:.2f} s after the storm, {normal:.2f} s before"
    await nothing_is_left(cluster, 3.0)


async def test_all_clients_leave_at_once(cluster: Cluster) -> None:
    channels = [connect(cluster) for _ in range(3)]
    calls = [open_stream(channels[number % 3], request_for(number, 60, 300, VOCAB)) for number in range(60)]
    for call in calls:
        for _ in range(3):
            await call.read()
    await asyncio.gather(*(channel.close() for channel in channels))
    await nothing_is_left(cluster, 3.0)


# ---- readers that do not read -------------------------------------------------------------------------------------


async def test_readers_that_never_read_slow_nobody_down_and_are_ended(small_cluster: Cluster) -> None:
    """30 of them for 16 seats: each runs until its window is used up, and gives its seat to whoever waits."""
    cluster = small_cluster
    async with connect(cluster, *SMALL_WINDOW) as lazy, connect(cluster) as channel:
        requests = [request_for(2 * number, 30, 60, VOCAB) for number in range(8)]
        alone = await asyncio.gather(*(timed(channel, request) for request in requests))
        before = memory(cluster)
        stalled = []
        for number in range(30):
            request = request_for(100 + number, 40, 2000, VOCAB)
            request.request.output.logprobs = 20  # which fill the window soon, however many tokens a message has
            stalled.append(open_stream(lazy, request))
        for call in stalled:
            await call.read()
        await asyncio.sleep(3.0)  # each in its turn, until its window is used up
        beside = await asyncio.gather(*(timed(channel, request) for request in requests))
        assert [answer for _, answer in beside] == [answer for _, answer in alone]
        slowest, normal = max(took for took, _ in beside), max(took for took, _ in alone)
        assert slowest < 3 * normal + 1.5, f"{slowest:.2f} s beside those who do not read, {normal:.2f} s alone"
        grown = {name: used - before[name] for name, used in memory(cluster).items()}
        assert max(grown.values()) < 32 * 2**20, grown
        deadline = time.monotonic() + PATIENCE + 10.0
        codes: Counter[grpc.StatusCode] = Counter()
        await nothing_is_left(cluster, deadline - time.monotonic())
        for call in stalled:
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                assert "slow consumer" in (error.details() or "")
            codes[await call.code()] += 1
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: 30}


# ---- too many -----------------------------------------------------------------------------------------------------


def test_workers_that_compute_on_the_cpu_give_way_to_the_router(small_cluster: Cluster) -> None:
    """Without it their sessions get a third of two busy cores each, and calls wait at the router's door."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for name, process in small_cluster.processes.items():
        expected = 0 if name == "router" else NICE
        threads = [int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")]
        assert min(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads) == min(19, mine + expected), name
        session = Path(f"/proc/{process.pid}/autogroup")
        if session.exists() and (text := session.read_text()):
            assert int(text.split()[-1]) == expected, name


async def test_ten_times_more_requests_than_fit_are_refused_quickly_and_the_others_finish(
    small_cluster: Cluster,
) -> None:
    cluster = small_cluster
    refusals: list[float] = []
    answers: list[Answer] = []

    async def one(channel: grpc.aio.Channel, number: int) -> None:
        started = time.monotonic()
        call = open_stream(channel, request_for(2 * number, 20, 40, VOCAB))
        tokens: list[int] = []
        try:
            async for message in call:
                tokens.extend(message.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            refusals.append(time.monotonic() - started)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            trailers = dict(error.trailing_metadata() or ())
            assert int(str(trailers["grpc-retry-pushback-ms"])) > 0
        else:
            answers.append(Answer(tokens))

    async def impossible(channel: grpc.aio.Channel) -> None:
        """Refused without a look at the queue: what this machine takes to carry so many calls."""
        call = open_stream(channel, request_for(1, 20, 0, VOCAB))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connect(cluster)) for _ in range(4)]
        began = time.monotonic()
        await asyncio.gather(*(impossible(channels[number % 4]) for number in range(10 * QUEUED)))
        bare = time.monotonic() - began
        await asyncio.gather(*(one(channels[number % 4], number) for number in range(10 * QUEUED)))
    assert len(answers) >= RUNNING + QUEUED and all(len(answer.token_ids) == 40 for answer in answers)
    assert len(refusals) > QUEUED, "they all fitted"
    allowed = max(0.5, 3 * bare)
    assert max(refusals) < allowed, f"{max(refusals):.2f} s to the last refusal, {bare:.2f} s for as many bad requests"
    await nothing_is_left(cluster, 3.0)
