"""The whole system as real processes: the same tokens whichever way a request goes and whatever dies on the way."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import signal
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from cluster import Cluster, running_cluster
from kill_workers import Stream, all_idle, busiest, decode_round, prefill_round, processor_seconds, request_for

from engine.batch import Batch, Row, SampleInput
from kvtransfer.startup import Engine, assemble
from pagewire.answers import PagewireError, WorkerStatus
from pagewire.client import AsyncClient
from pagewire.local_engine import LocalEngine
from prefill_service.config import ROLE
from wire.codec import params_from_pb
from wire.health import is_ready
from wire.options import parse

VOCAB = 250
WITH_NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(package) for package in ("nixl_cu12", "nixl_cu13")), reason="nixl is not installed"
)


@pytest.fixture
async def router(cluster: Cluster) -> grpc.aio.Channel:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        yield channel


def an_engine(model_cache: Path) -> Engine:
    argv = ["--model", "random:tiny", "--cache-dir", str(model_cache), "--kv-memory", "32Mi"]
    return assemble(parse(ROLE, argv, {}), lambda phase: None)


def through_one_loop(model_cache: Path, round_number: int, prompt_tokens: int, max_tokens: int) -> list[int]:
    """No scheduler, no transfer, no second stage: one table, one row, one token after the other."""
    engine = an_engine(model_cache)
    request = request_for(round_number, prompt_tokens, max_tokens, VOCAB).request
    params = params_from_pb(request.sampling, request.stopping, request.output)
    prompt, output = list(request.token_ids.ids), []
    blocks = list(range(-(-(prompt_tokens + max_tokens) // engine.config.block_size)))
    fed, start = prompt, 0
    for index in range(max_tokens):
        sample = SampleInput(params=params, index=index, prompt=prompt, output=output, eos=frozenset())
        row = Row(slot=0, tokens=fed, start=start, blocks=blocks, sample=sample)
        (token,) = engine.runner.step(Batch(rows=[row])).tokens
        output.append(token.token_id)
        start += len(fed)
        fed = [token.token_id]
    return output


def through_local(model_cache: Path, round_number: int, prompt_tokens: int, max_tokens: int) -> list[int]:
    """Both stages in one process, over one pool: blocks change owner and are not copied."""
    parts = an_engine(model_cache)
    engine = LocalEngine(parts.runner, parts.config)
    request = request_for(round_number, prompt_tokens, max_tokens, VOCAB).request
    engine.add_request(request.token_ids.ids, params_from_pb(request.sampling, request.stopping, request.output))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token.token_id for _, token, _ in engine.step()]
    return tokens


@pytest.mark.parametrize("round_number", [0, 1], ids=["greedy", "sampled with penalties"])
async def test_local_grpc_and_one_unsplit_loop_give_equal_tokens(
    round_number: int, router: grpc.aio.Channel, model_cache: Path
) -> None:
    shape = {"prompt_tokens": 75, "max_tokens": 40}
    by_grpc = await Stream(router, request_for(round_number, **shape, vocab=VOCAB)).whole()
    assert len(by_grpc.token_ids) == 40
    assert by_grpc.token_ids == through_local(model_cache, round_number, **shape)
    assert by_grpc.token_ids == through_one_loop(model_cache, round_number, **shape)


async def kv_path(cluster: Cluster) -> str:
    """How the decode worker says that its blocks came; it says so with its next load."""
    async with AsyncClient(cluster.address) as client:
        for _ in range(40):
            info = await client.server_info()
            if paths := [worker.kv_path for worker in info.workers if worker.kv_path]:
                return paths[0]
            await asyncio.sleep(0.05)
    return ""


@pytest.mark.parametrize(
    ("prefill", "decode", "path"),
    [
        (("auto", "on"), ("auto", "on"), "memfd"),
        (("memfd", "off"), ("memfd", "off"), "memfd"),
        pytest.param(("nixl", "on"), ("nixl", "on"), "nixl", marks=WITH_NIXL),
        (("grpc", "on"), ("auto", "on"), "grpc (memfd: not offered by its owner"),
    ],
    ids=["auto", "memfd without digests", "nixl", "fallback"],
)
async def test_tokens_are_the_same_whichever_way_the_blocks_went_and_the_way_is_told(
    prefill: tuple[str, str], decode: tuple[str, str], path: str, model_cache: Path, tmp_path: Path
) -> None:
    shape = {"prompt_tokens": 75, "max_tokens": 20}
    with running_cluster(tmp_path, cache_dir=model_cache, start=False) as cluster:
        for name, (transport, digest) in {"prefill-1": prefill, "decode-1": decode}.items():
            program = cluster.programs[name]
            argv = (*program.argv, "--transport", transport, "--kv-digest", digest)
            cluster.programs[name] = replace(program, argv=argv)
        cluster.start()
        await asyncio.to_thread(cluster.wait_ready)
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            for round_number in (0, 1):
                answer = await Stream(channel, request_for(round_number, **shape, vocab=VOCAB)).whole()
                assert answer.token_ids == through_local(model_cache, round_number, **shape)
        assert (await kv_path(cluster)).startswith(path)
        assert await all_idle(cluster) == ""


async def test_a_decode_worker_below_the_floor_is_not_ready_and_everybody_is_told_both_numbers(
    model_cache: Path, tmp_path: Path
) -> None:
    with running_cluster(tmp_path, cache_dir=model_cache, start=False) as cluster:
        program = cluster.programs["decode-1"]
        cluster.programs["decode-1"] = replace(program, argv=(*program.argv, "--min-transfer-gbps", "9000"))
        cluster.start()
        why = re.compile(r"can pull KV blocks from no prefill worker: .* GB/s, and --min-transfer-gbps asks for 9000")
        async with AsyncClient(cluster.address) as client, asyncio.timeout(60):
            workers: list[WorkerStatus] = []
            while not any(why.search(worker.reason) for worker in workers):
                await asyncio.sleep(0.1)
                with contextlib.suppress(PagewireError):  # the router is not up yet
                    workers = list((await client.server_info()).workers)
            decode = next(worker for worker in workers if worker.role == "decode")
            assert not decode.accepting
            (path,) = decode.kv_paths
            assert path.transport == "" and "memfd: " in path.fallback and "grpc: " in path.fallback
        async with grpc.aio.insecure_channel(decode.address) as channel, asyncio.timeout(10):
            while await is_ready(channel, "pagewire.v1.DecodeService", 5.0):
                await asyncio.sleep(0.1)


async def test_many_requests_at_once_get_what_each_gets_alone(router: grpc.aio.Channel, cluster: Cluster) -> None:
    requests = [request_for(number, 5 + 17 * number, 30, VOCAB) for number in range(10, 22)]
    together = await asyncio.gather(*(Stream(router, request).whole() for request in requests))
    for request, answer in zip(requests, together, strict=True):
        assert answer == await Stream(router, request).whole()
    assert await all_idle(cluster) == ""


@pytest.mark.parametrize("sampled", [0, 1], ids=["greedy", "sampled with penalties"])
async def test_kill_9_of_the_decode_worker_in_mid_stream_changes_nothing(breakable: Cluster, sampled: int) -> None:
    async with grpc.aio.insecure_channel(breakable.address) as channel:
        for number in range(sampled, 20, 2):
            request = request_for(number, 40, 200, VOCAB)
            broken = await decode_round(breakable, channel, request)
            await asyncio.to_thread(breakable.wait_ready)
            if broken is not None:
                assert broken == await Stream(channel, request).whole()
                assert len(broken.token_ids) == 200
                break
        else:
            pytest.fail("every kill came too late")
    assert await all_idle(breakable) == ""


async def test_kill_9_of_the_prefill_worker_before_token_0_changes_nothing(breakable: Cluster) -> None:
    async with grpc.aio.insecure_channel(breakable.address) as channel:
        for number in range(20):
            request = request_for(number, 3000, 20, VOCAB)
            broken = await prefill_round(breakable, channel, request)
            await asyncio.to_thread(breakable.wait_ready)
            if broken is not None:
                assert broken == await Stream(channel, request).whole()
                break
        else:
            pytest.fail("every kill came too late")
    assert await all_idle(breakable) == ""


async def test_a_stopped_decode_worker_is_left_and_may_come_back(breakable: Cluster) -> None:
    """SIGSTOP says nothing to anybody: silence has to be noticed, and what it says later must do no harm."""
    async with grpc.aio.insecure_channel(breakable.address) as channel:
        before = processor_seconds(breakable, "decode")
        request = request_for(1, 40, 300, VOCAB)
        stream = Stream(channel, request)
        await stream.until_tokens(20)
        await asyncio.sleep(0.05)
        victim = busiest(breakable, "decode", before)
        breakable.signal(victim, signal.SIGSTOP)
        broken = await stream.whole()
        breakable.signal(victim, signal.SIGCONT)
        await asyncio.to_thread(breakable.wait_ready)
        assert broken == await Stream(channel, request).whole()
    assert await all_idle(breakable) == ""


async def test_sigterm_of_a_decode_worker_hands_its_streams_over(breakable: Cluster) -> None:
    """Its grace is short, so it gives up streams that another worker has to finish."""
    program = breakable.programs["decode-1"]
    breakable.programs["decode-1"] = replace(program, argv=(*program.argv, "--grace", "0.2"))
    breakable.kill("decode-1")
    breakable.start("decode-1")
    await asyncio.to_thread(breakable.wait_ready)
    async with grpc.aio.insecure_channel(breakable.address) as channel:
        requests = [request_for(number, 40, 400, VOCAB) for number in range(4)]
        streams = [Stream(channel, request) for request in requests]
        for stream in streams:
            await stream.until_tokens(5)
        assert await asyncio.to_thread(breakable.stop, "decode-1") == 0
        answers = [await stream.whole() for stream in streams]
        breakable.start("decode-1")
        await asyncio.to_thread(breakable.wait_ready)
        for request, answer in zip(requests, answers, strict=True):
            assert answer == await Stream(channel, request).whole()
    assert await all_idle(breakable) == ""


async def test_five_processes_on_two_cores_are_never_taken_for_dead(breakable: Cluster) -> None:
    already = {name: len(breakable.written(name)) for name in breakable.programs}
    async with grpc.aio.insecure_channel(breakable.address) as channel:
        requests = [request_for(number, 600, 120, VOCAB) for number in range(24)]
        answers = await asyncio.gather(*(Stream(channel, request).whole() for request in requests))
    assert all(len(answer.token_ids) == 120 for answer in answers)
    for name, start in already.items():
        written = breakable.written(name)[start:]
        assert "session_over" not in written and "silent" not in written, written
    assert await all_idle(breakable) == ""
