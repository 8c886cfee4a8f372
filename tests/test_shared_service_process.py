"""Both stages in one real process behind a real router: tokens, kill -9, drain, and what `ps` and /metrics say."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from cluster import SHARED_CLUSTERS, Cluster, running_cluster
from kill_workers import Stream, request_for

from pagewire.cli.status import ps, transport
from pagewire.client import AsyncClient
from wire.security import Security

VOCAB = 250
WORKER = "shared-1"


@pytest.fixture(scope="module")
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_cache: Path
) -> Iterator[Cluster]:
    """Prompts in chunks of 64, so that a prompt of some hundred tokens takes its turns with others' steps."""
    options = {"shared": True, "cache_dir": model_cache, "max_num_batched_tokens": 64}
    with running_cluster(tmp_path_factory.mktemp("shared"), **options) as running:
        known = request.config.stash[SHARED_CLUSTERS]
        known.append(running)
        yield running
        known.remove(running)


@pytest.fixture(autouse=True)
def _no_leftovers_of_this_module(shared: Cluster) -> Iterator[None]:
    yield
    shared.restore()


async def all_free(shared: Cluster) -> bool:
    """Both of the router's workers are there, and no block is in use: it hears so about once a second."""
    async with AsyncClient(shared.address) as client:
        for _ in range(100):
            workers = (await client.server_info()).workers
            if len(workers) == 2 and all(one.accepting and one.free_blocks == one.total_blocks for one in workers):
                return True
            await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize("round_number", [0, 1], ids=["greedy", "sampled with penalties"])
async def test_tokens_are_those_of_the_split_deployment(shared: Cluster, cluster: Cluster, round_number: int) -> None:
    request = request_for(round_number, 150, 40, VOCAB)
    answers = []
    for each in (cluster, shared):
        async with grpc.aio.insecure_channel(each.address) as channel:
            answers.append((await Stream(channel, request).whole()).token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 40


async def test_many_requests_at_once_get_what_each_gets_alone_and_nothing_is_left(shared: Cluster) -> None:
    requests = [request_for(number, 5 + 29 * number, 25, VOCAB) for number in range(12)]
    async with grpc.aio.insecure_channel(shared.address) as channel:
        together = await asyncio.gather(*(Stream(channel, request).whole() for request in requests))
        for request, answer in zip(requests, together, strict=True):
            assert answer == await Stream(channel, request).whole()
    assert await all_free(shared)
    assert shared.tracebacks(WORKER) == []


async def test_blocks_go_by_local_and_ps_and_metrics_say_so(
    shared: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        await Stream(channel, request_for(3, 40, 5, VOCAB)).whole()
    async with AsyncClient(shared.address) as client, asyncio.timeout(30):
        while transport(await client.server_info()) != "local":  # its load goes to the router once a second
            await asyncio.sleep(0.1)
    await ps(shared.address, Security(), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["prefill", "decode"]
    assert len({line.split()[1] for line in lines[2:4]}) == 1, "one address has both"
    port = shared.topology.prefill_http_port
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
    for role in ("prefill", "decode"):
        assert f'pagewire_step_seconds_count{{role="{role}"}}' in page
    helps = [line for line in page.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)), "a family stands on the page once"


async def test_kill_9_in_mid_stream_changes_nothing_once_it_is_there_again(shared: Cluster) -> None:
    request = request_for(1, 40, 200, VOCAB)
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stream = Stream(channel, request)
        await stream.until_tokens(10)
        shared.kill(WORKER)
        shared.start(WORKER)
        broken = await stream.whole()
        await asyncio.to_thread(shared.wait_ready)
        assert broken == await Stream(channel, request).whole()
        assert len(broken.token_ids) == 200
    assert await all_free(shared)


async def test_sigterm_lets_a_running_stream_finish_and_refuses_new_ones(shared: Cluster) -> None:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stream = Stream(channel, request_for(2, 40, 150, VOCAB))
        await stream.until_tokens(5)
        shared.signal(WORKER, signal.SIGTERM)
        answer = await stream.whole()
        assert len(answer.token_ids) == 150
    with contextlib.suppress(ProcessLookupError):
        assert await asyncio.to_thread(shared.processes[WORKER].wait, 20) == 0
    assert shared.tracebacks(WORKER) == []
