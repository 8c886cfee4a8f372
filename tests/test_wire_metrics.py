"""What operators see on every /metrics: our names, vLLM's names for the same values, and the line each ten seconds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, running_cluster
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from wire import metrics
from wire.http import WorkerDoor
from wire.metrics import Reading, Series, line, shown

BODY = {"prompt": "the same words, again and again and again", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def compat(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log_dir = tmp_path_factory.mktemp("compat")
    with running_cluster(log_dir, cache_dir=model_cache, metrics_compat="vllm") as cluster:
        for _ in range(2):
            url = f"{cluster.topology.url}/v1/completions"
            httpx.post(url, json=BODY, timeout=30, trust_env=False).raise_for_status()
        yield cluster


def samples(port: int) -> dict[str, float]:
    """name{labels} with sorted labels: value."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    return {
        sample.name + str(sorted((k, v) for k, v in sample.labels.items() if k not in ("role", "engine"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(port: int, name: str) -> float:
    return sum(number for key, number in samples(port).items() if key.split("[")[0] == name)


def test_each_worker_counts_what_its_own_stage_did(compat: Cluster) -> None:
    prefill, decode = compat.topology.prefill_http_port, compat.topology.decode_http_port
    prompt = value(prefill, "pagewire_prompt_tokens_total")
    assert prompt == value(compat.topology.http_port, "pagewire_prompt_tokens_total") > 20
    assert 0 < value(prefill, "pagewire_prefix_cache_hits_total") < prompt, "the second prompt was cached"
    assert value(decode, "pagewire_generation_tokens_total") == 10, "token 0 is the prefill's"
    for port in (prefill, decode):
        assert value(port, "pagewire_request_queue_time_seconds_count") == 2
        assert value(port, "pagewire_step_seconds_count") > 0
        blocks = {key: number for key, number in samples(port).items() if key.startswith("pagewire_kv_blocks[")}
        assert sum(blocks.values()) == 512, "each block counts once"
    assert value(decode, "pagewire_kv_transfer_seconds_count") == 2
    assert value(decode, "pagewire_kv_transfer_bytes_total") > 0
    assert samples(prefill)["pagewire_requests_finished_total[('reason', 'handed_over')]"] == 2
    assert samples(decode)["pagewire_requests_finished_total[('reason', 'length')]"] == 2


def test_vllms_names_show_the_same_values(compat: Cluster) -> None:
    """What a stock vLLM dashboard asks for."""
    router, decode = compat.topology.http_port, compat.topology.decode_http_port
    both = {
        "prompt_tokens_total": "prompt_tokens_total", "generation_tokens_total": "generation_tokens_total",
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "time_per_output_token_seconds_sum": "inter_token_latency_seconds_sum",
        "e2e_request_latency_seconds_sum": "e2e_request_latency_seconds_sum",
        "request_prompt_tokens_bucket": "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket": "request_generation_tokens_bucket",
        "request_queue_time_seconds_count": "request_queue_time_seconds_count",
        "request_prefill_time_seconds_sum": "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum": "request_decode_time_seconds_sum",
    }  # fmt: skip
    for theirs, ours in both.items():
        assert value(router, f"vllm:{theirs}") == value(router, f"pagewire_{ours}") > 0, theirs
    found = samples(router)
    model = next(key for key in found if key.startswith("vllm:num_requests_running["))
    assert "('model_name', 'random:tiny')" in model
    assert found["vllm:request_success_total[('finished_reason', 'length'), ('model_name', 'random:tiny')]"] == 2
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= {key.split("[")[0] for key in found}
    assert value(decode, "vllm:num_preemptions_total") == 0 and value(decode, "vllm:cache_config_info") == 1
    assert any("('num_gpu_blocks', '512')" in key for key in samples(decode))


def test_vllms_names_are_shown_only_on_demand(cluster: Cluster) -> None:
    for port in (cluster.topology.http_port, cluster.topology.prefill_http_port):
        assert "vllm:" not in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text


def test_every_name_and_unit_is_what_prometheus_tools_expect(compat: Cluster) -> None:
    topology = compat.topology
    for port in (topology.http_port, topology.prefill_http_port, topology.decode_http_port):
        families = list(text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics").text))
        for family in families:
            if not family.name.startswith("pagewire_"):
                continue
            assert family.documentation.endswith("."), family.name
            assert re.fullmatch(r"[a-z0-9_]+", family.name), family.name
            assert all("role" in sample.labels for sample in family.samples), family.name
        names = [family.name for family in families]
        assert len(names) == len(set(names)), "a family comes once"


# ---- a worker's door ----------------------------------------------------------------------------------------------


async def ask(door: WorkerDoor, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    transport = httpx.ASGITransport(app=door)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        answer = await client.request(method, path, headers=headers)
        return answer.status_code, answer.text


async def test_a_workers_port_needs_the_token_for_metrics_and_none_for_health() -> None:
    ready = False
    door = WorkerDoor(Series("prefill").registry, lambda: ready, "secret")
    assert await ask(door, "/health") == (503, "not ready: loading, draining or stuck\n")
    ready = True
    assert await ask(door, "/health") == (200, "") == await ask(door, "/ping")
    assert (await ask(door, "/metrics"))[0] == (await ask(door, "/metrics", Authorization="Bearer wrong"))[0] == 401
    status, text = await ask(door, "/metrics", Authorization="Bearer secret")
    assert status == 200 and 'pagewire_build_info{role="prefill"' in text
    assert (await ask(door, "/v1/models"))[0] == 404 and (await ask(door, "/metrics", "POST"))[0] == 405


# ---- the line -----------------------------------------------------------------------------------------------------


def test_the_line_has_rates_for_what_the_process_does() -> None:
    before = Reading(2, 1, prompt_tokens=100, generation_tokens=50, cached_tokens=10)
    now = Reading(3, 0, prompt_tokens=300, generation_tokens=450, cached_tokens=60, kv_use=0.125)
    assert line(before, now, 10.0) == (
        "3 running, 0 waiting, 20.0 prompt tokens/s, 40.0 tokens/s, KV use 12.5%, prefix hits 25.0%"
    )
    assert (
        line(Reading(0, 0), Reading(1, 0, generation_tokens=5), 10.0)
        == "1 running, 0 waiting, 0.5 tokens/s, KV use 0.0%"
    )


async def test_a_process_that_does_nothing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REPORT_S", 0.02)
    states, said = [Reading(0, 0)], list[str]()
    reporting = asyncio.create_task(metrics.report(lambda: states[-1], said.append))
    await asyncio.sleep(0.1)
    assert not said
    states.append(Reading(0, 0, generation_tokens=7))
    await asyncio.sleep(0.1)
    assert len(said) == 1
    states.append(Reading(1, 0, generation_tokens=7))
    await asyncio.sleep(0.1)
    assert len(said) > 2
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)


def test_a_counter_is_there_before_it_counts() -> None:
    """What appears with its first 1 has no increase that Prometheus could see."""
    series = Series("router")
    count: Callable[[str], object] = series.counters("things", "Things.", "kind", ("known",))
    text = generate_latest(shown(series.registry, None, str)).decode()
    assert 'pagewire_things_total{kind="known",role="router"} 0.0' in text and callable(count)
