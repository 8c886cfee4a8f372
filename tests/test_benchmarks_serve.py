"""`pagewire bench serve` and `offline`: what they send, when, and what they make of what they see.

The HTTP side is tested against a server of a few lines that answers as other servers do; both protocols against a real
router and its workers.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster

from benchmarks.serve import run as serve_run
from benchmarks.serve.arrivals import send_times
from benchmarks.serve.http_target import HttpTarget
from benchmarks.serve.lengths import Job, Material, make_jobs
from benchmarks.serve.record import Facts, Record
from benchmarks.serve.results import PER_REQUEST, failures, figures, table
from benchmarks.serve.settings import BenchError, Lengths, Settings, parse_goodput
from pagewire.cli import main

# What `vllm bench serve --save-detailed` writes for a generating model, its default metrics and percentile.
VLLM_KEYS = set(
    """
    date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration
    completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
    total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors
    max_output_tokens_per_s max_concurrent_requests rtfx
    mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms
    mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms
    """.split()  # noqa: SIM905
)
FACTS = Facts("tiny", 8192)


# ---- when ---------------------------------------------------------------------------------------------------------


def test_requests_arrive_at_the_asked_rate_and_the_same_seed_repeats_them() -> None:
    times = send_times(500, 25.0, 1.0, random.Random(3))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500 / 25.0)
    assert times == send_times(500, 25.0, 1.0, random.Random(3))
    assert times != send_times(500, 25.0, 1.0, random.Random(4))
    assert send_times(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness, spread", [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float, spread: float) -> None:
    times = [0.0, *send_times(20_000, 10.0, burstiness, random.Random(1))]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.1)


class Slow:
    """A target whose answers take longer than the whole schedule."""

    backend = "slow"

    async def send(self, record: Record) -> None:
        record.sent = time.perf_counter()
        await asyncio.sleep(0.3)
        record.add(time.perf_counter(), 1, "x")
        record.output_len = 1


async def test_slow_answers_delay_no_later_request_of_an_open_loop() -> None:
    jobs = [Job([1], 1, 1)] * 40
    times = [0.005 * place for place in range(40)]
    records, seconds = await serve_run.drive(Slow(), Settings(), jobs, times)  # type: ignore[arg-type]
    assert seconds < 2.0, "one after the other they take 12 s"
    begin = records[0].due
    assert [record.due - begin for record in records] == pytest.approx(times)
    assert statistics.median(record.sent - record.due for record in records) < 0.05


async def test_a_closed_loop_never_has_more_requests_open_than_it_may() -> None:
    jobs = [Job([1], 1, 1)] * 6
    records, seconds = await serve_run.drive(Slow(), Settings(max_concurrency=2), jobs, [0.0] * 6)  # type: ignore[arg-type]
    assert figures(Settings(max_concurrency=2), FACTS, "slow", records, seconds)["max_concurrent_requests"] == 2
    assert seconds >= 0.9


# ---- what ---------------------------------------------------------------------------------------------------------


def jobs_of(lengths: Lengths, count: int = 50, longest: int | None = 8192) -> Sequence[Job]:
    return make_jobs(Settings(lengths=lengths, num_prompts=count), Material(range(100, 200)), longest, random.Random(7))


def test_random_prompts_have_exactly_the_asked_lengths() -> None:
    for job in jobs_of(Lengths(input_len=37, output_len=5)):
        assert len(job.prompt) == job.prompt_len == 37
        assert job.output_len == 5
    varied = jobs_of(Lengths(input_len=100, output_len=10, range_ratio=0.5), 300)
    assert {len(job.prompt) for job in varied} <= set(range(50, 151))
    assert min(job.prompt_len for job in varied) < 60 and max(job.prompt_len for job in varied) > 140


def test_lengths_shaped_like_sharegpt_have_its_averages_and_its_tail() -> None:
    jobs = jobs_of(Lengths("sharegpt"), 4000)
    prompts, answers = [job.prompt_len for job in jobs], [job.output_len for job in jobs]
    assert statistics.mean(prompts) == pytest.approx(213, rel=0.08)
    assert statistics.mean(answers) == pytest.approx(204, rel=0.08)
    assert statistics.median(prompts) < 0.7 * statistics.mean(prompts)
    assert max(prompts) <= 1024 and max(map(sum, zip(prompts, answers, strict=True))) <= 2048
    short = jobs_of(Lengths("sharegpt"), 200, longest=256)
    assert max(job.prompt_len + job.output_len for job in short) <= 256


def test_prefix_shared_prompts_have_as_many_beginnings_as_asked_for() -> None:
    jobs = jobs_of(Lengths("prefix_repetition", prefix_len=32, suffix_len=8, num_prefixes=3), 30)
    assert len({tuple(job.prompt[:32]) for job in jobs}) == 3
    assert len({tuple(job.prompt) for job in jobs}) == 30


def test_lengths_that_the_model_cannot_take_are_refused_with_both_numbers() -> None:
    with pytest.raises(BenchError, match=r"9000 prompt and 32 answer tokens, 9032 in all, and this model takes 8192"):
        jobs_of(Lengths(input_len=9000))


# ---- figures ------------------------------------------------------------------------------------------------------


def record(sent: float, chunks: Sequence[tuple[float, int]], error: str = "") -> Record:
    seen = Record(Job([1] * 10, 10, sum(tokens for _, tokens in chunks)), due=sent, released=sent, sent=sent)
    for after, tokens in chunks:
        seen.add(sent + after, tokens, "x")
    seen.prompt_len, seen.output_len, seen.error = 10, seen.job.output_len, error
    return seen


def test_figures_are_vllms_by_name_and_by_definition() -> None:
    records = [
        record(100.0, [(0.1, 1), (0.2, 4), (0.5, 1)]),  # 6 tokens: TPOT 80 ms, gaps 100 and 300 ms
        record(100.2, [(0.3, 1)]),  # one token has no TPOT
        record(100.3, [], "UNAVAILABLE: nobody is there"),
    ]
    settings = Settings(goodput=parse_goodput(["ttft:200"], ["tpot:90"]), num_prompts=3)
    result = figures(settings, FACTS, "pagewire-grpc", records, 2.0)
    assert set(result) == VLLM_KEYS
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 7)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx(80)
    assert result["mean_itl_ms"] == pytest.approx(200)
    assert result["std_itl_ms"] == pytest.approx(100)
    assert result["p99_itl_ms"] == pytest.approx(298)
    assert result["request_goodput"] == pytest.approx(0.5), "the second is too late"
    assert result["output_throughput"] == pytest.approx(3.5)
    assert result["max_output_tokens_per_s"] == 7
    assert result["max_concurrent_requests"] == 2
    assert result["errors"] == ["", "", "UNAVAILABLE: nobody is there"]
    assert result["output_lens"] == [6, 1, 0]
    json.dumps(result)


def test_the_table_has_vllms_lines_and_names_each_reason_of_failure_once() -> None:
    records = [record(0.0, [(0.1, 1), (0.2, 1)]), *[record(0.0, [], "HTTP_429: too many") for _ in range(3)]]
    settings = Settings(num_prompts=4, percentile_metrics=("ttft", "e2el"), percentiles=(50.0, 99.9))
    text = table(settings, figures(settings, FACTS, "openai", records, 1.0), records)
    assert f"{'Successful requests:':<40} 1" in text.splitlines()
    assert f"{'P99.9 E2EL (ms):':<40} 200.00" in text.splitlines()
    assert "3 failed with HTTP_429, the first: too many" in text.splitlines()
    assert failures(records) == [("HTTP_429", 3, "too many")]
    assert "TPOT" not in text


# ---- other HTTP servers -------------------------------------------------------------------------------------------

Answer = Callable[[int, dict[str, Any]], Sequence[bytes]]


@asynccontextmanager
async def http_server(answer: Answer) -> AsyncIterator[tuple[str, list[int]]]:
    """Its URL, and the number of requests on each connection. `answer` gives the bytes, piece by piece."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(connections)
        connections.append(0)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")
                )
                body = json.loads(await reader.readexactly(length) or b"{}")
                connections[place] += 1
                for piece in answer(sum(connections), body):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                    if not piece:
                        return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


def whole(status: int, body: bytes) -> list[bytes]:
    return [b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)]


def streamed(*events: Any, done: bool = True) -> list[bytes]:
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"] * done
    pieces = [b"%x\r\n%s\r\n" % (len(line), line) for line in lines]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *pieces, b"0\r\n\r\n"]


def chat(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


async def sent(answer: Answer, count: int = 1, **settings: Any) -> tuple[list[Record], list[int]]:
    async with http_server(answer) as (url, connections):
        given = Settings(protocol="http", base_url=url, endpoint="/v1/chat/completions", **settings)
        target = HttpTarget(given)
        records = [Record(Job("hello", 1, 8)) for _ in range(count)]
        for each in records:
            await target.send(each)
        await target.close()
        return records, connections


async def test_a_bare_role_is_no_first_token_and_tokens_are_those_of_the_usage() -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[bytes]:
        assert body["stream_options"] == {"include_usage": True}
        return streamed(
            chat({"role": "assistant", "content": ""}),
            chat({"content": "one two three"}),
            chat({"content": " four"}),
            chat({}, "length"),
            {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}},
        )

    (seen,), _ = await sent(answer)
    assert (seen.error, seen.prompt_len, seen.output_len, seen.text) == ("", 11, 4, "one two three four")
    assert len(seen.chunk_times) == 2
    assert seen.ttft >= 0.015, "not at the role"


async def test_connections_are_kept_and_one_that_was_closed_meanwhile_is_replaced() -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[bytes]:
        stream = streamed(chat({"content": "x"}, "stop"))
        return [*stream, b""] if number == 2 else stream  # the server hangs up after its second answer

    records, connections = await sent(answer, 4)
    assert [each.error for each in records] == [""] * 4
    assert connections == [2, 2]


@pytest.mark.parametrize(
    "pieces, error",
    [
        (whole(429, b'{"error": {"message": "too many requests"}}'), "HTTP_429: too many requests"),
        (whole(500, b"<html>"), "HTTP_500: <html>"),
        (
            streamed(chat({"content": "x"}), {"error": {"message": "the worker is gone"}}),
            "STREAM: the worker is gone",
        ),
        (streamed(chat({"content": "x"}), done=False), "BAD_ANSWER: the stream ended without a finish reason"),
        ([*streamed(chat({"content": "x"}))[:2], b""], "BAD_ANSWER: the connection was closed in the middle"),
        ([b""], "CONNECTION: the server closed the connection without an answer"),
        ([b"\x00\x00 not HTTP\r\n\r\n"], "BAD_ANSWER: what answers there does not speak HTTP/1.1"),
    ],
)
async def test_what_goes_wrong_over_http_has_a_reason_and_a_sentence(pieces: list[bytes], error: str) -> None:
    (seen,), _ = await sent(lambda number, body: pieces)
    assert seen.error.startswith(error)
    assert (seen.ttft, seen.itl) == (0.0, [])


async def test_a_server_that_never_ends_its_answer_runs_into_the_timeout() -> None:
    (seen,), _ = await sent(lambda number, body: [streamed()[0], *[b"1\r\n\n\r\n"] * 200], timeout=0.2)
    assert seen.error == "TIMEOUT: the answer was not complete after 0.2 s"


# ---- the command --------------------------------------------------------------------------------------------------


def bench(*arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_run_against_a_real_router_saves_what_vllm_saves(cluster: Cluster, protocol: str, tmp_path: Path) -> None:
    server = (
        ["--address", cluster.address]
        if protocol == "grpc"
        else ["--base-url", f"http://127.0.0.1:{cluster.topology.http_port}"]
    )
    done = bench(
        "serve", "--protocol", protocol, *server, "--num-prompts", "12", "--request-rate", "40", "--input-len", "33",
        "--output-len", "9", "--goodput", "ttft:60000", "tpot:60000", "--save-detailed", "--result-dir", str(tmp_path),
        "--result-filename", "run.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Serving Benchmark Result" in done.stdout
    result = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert set(result) == VLLM_KEYS
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["output_lens"] == [9] * 12
    assert result["input_lens"] == [33] * 12
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert all(0 < first <= whole for first, whole in zip(result["ttfts"], result["latencies"], strict=True))


def test_a_failed_request_is_named_and_changes_the_exit_status(cluster: Cluster, tmp_path: Path) -> None:
    done = bench(
        "serve", "--address", cluster.address, "--num-prompts", "2", "--timeout", "0.1", "--output-len", "4000",
        "--save-result", "--result-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert "2 failed with DEADLINE_EXCEEDED" in done.stdout
    assert done.stderr.strip().endswith("2 of 2 requests failed")
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text("utf-8"))
    assert result["failed"] == 2
    assert not set(result) & set(PER_REQUEST)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--goodput", "speed:1"], "--goodput takes ttft:MS, tpot:MS, e2el:MS, got 'speed:1'"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--dataset-name", "alpaca"], "--dataset-name must be random, sharegpt, prefix_repetition, got 'alpaca'"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles takes numbers from 0 to 100"),
        (["--protocol", "http", "--base-url", "localhost"], "--base-url must be http://HOST:PORT"),
        (["--dataset-name", "sharegpt", "--dataset-path", "nowhere.json"], "No such file or directory"),
        (["--plot", "run.bmp"], "--plot must end in .png, .svg, .pdf"),
        (["stray"], "'stray' belongs to no flag"),
    ],
)
def test_flags_that_fit_nothing_are_refused_before_anything_is_sent(
    cluster: Cluster,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagewire", "bench", "serve", "--address", cluster.address, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    seen = capsys.readouterr()
    assert ended.value.code == 2, seen.out
    assert sentence in seen.err


def test_a_sharegpt_file_is_sent_with_its_own_prompts_and_lengths(cluster: Cluster, tmp_path: Path) -> None:
    turns = [{"value": "What is a block table?"}, {"value": "A list of block ids."}]
    data = [{"conversations": turns}, {"conversations": turns[:1]}]
    (tmp_path / "data.json").write_text(json.dumps(data), "utf-8")
    done = bench(
        "serve", "--address", cluster.address, "--num-prompts", "3", "--dataset-name", "sharegpt",
        "--dataset-path", str(tmp_path / "data.json"), "--ignore-eos", "--save-detailed",
        "--result-dir", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").iterdir()
    result = json.loads(file.read_text("utf-8"))
    assert len(set(result["input_lens"])) == len(set(result["output_lens"])) == 1
    assert result["output_lens"][0] >= 4


def test_the_offline_benchmark_prints_vllms_three_lines(model_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "offline.json"
    done = bench(
        "offline", "--model", "random:tiny", "--cache-dir", str(model_cache), "--threads", "1", "--kv-memory", "16MiB",
        "--num-prompts", "4", "--input-len", "20", "--output-len", "6", "--output-json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["Total num prompt tokens:  80", "Total num output tokens:  24"]
    result = json.loads(file.read_text("utf-8"))
    assert result["total_num_tokens"] == 104
    assert result["tokens_per_second"] == pytest.approx(104 / result["elapsed_time"])


def test_kernels_are_not_measured_without_a_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["pagewire", "bench", "kernels"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "the kernels run on a CUDA card" in capsys.readouterr().err
