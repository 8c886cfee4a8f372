"""What the router itself costs and how late its tokens are: `python -m benchmarks.router`.

Starts a router with one fake prefill and one fake decode worker (benchmarks.fake_worker), which pace tokens as engines
do and compute nothing, and loads its two doors from other processes (benchmarks.router_load). Prints each figure
beside what it must reach: CPU of the router's process per token, how late a token is from its worker's send to its
client's receipt, a thousand streams at once, the refusal of the one after them, what HTTP adds to the first token, and
how soon a worker knows of a client that left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tokenizers
import uvloop

from benchmarks import router_load
from benchmarks.startup import free_port

PLACES = 1000  # --max-concurrent-requests
FIRST = {
    "grpc": 1000,
    "http": 2000,
    "thousand": 3000,
    "full": 5000,
    "one": 7000,
    "left": 8000,
}  # numbers of the streams of each part


@dataclass(frozen=True, slots=True)
class Deployment:
    router: psutil.Process
    grpc: str
    http: str
    workers: Sequence[subprocess.Popen[bytes]]
    records: Sequence[Path]

    def records_of(self, role: int) -> dict[str, Any]:
        """Ends the worker, which then writes down what it did."""
        self.workers[role].terminate()
        self.workers[role].wait(30)
        return json.loads(self.records[role].read_text())


@contextlib.contextmanager
def deployment(model: str, directory: Path, places: int) -> Iterator[Deployment]:
    prepared = json.loads(
        subprocess.check_output([sys.executable, "-m", "engine.loader", "prepare", model]).splitlines()[-1]
    )
    words = directory / "words.json"
    words.write_text(json.dumps(_words(Path(prepared["dir"]))))
    records = [directory / "prefill.json", directory / "decode.json"]
    with contextlib.ExitStack() as stack:
        workers, addresses = [], []
        for role, record in zip(("prefill", "decode"), records, strict=True):
            argv = [sys.executable, "-m", "benchmarks.fake_worker", "--role", role, "--digest", prepared["digest"]]
            worker = subprocess.Popen([*argv, "--words", words, "--record", record], stdout=subprocess.PIPE)
            stack.callback(worker.kill)
            workers.append(worker)
            assert worker.stdout is not None, "it was started with a pipe"
            addresses.append(json.loads(worker.stdout.readline())["address"])
        port, http_port = free_port(), free_port()
        argv = [sys.executable, "-m", "router", "--model", model, "--port", str(port), "--http-port", str(http_port)]
        argv += ["--prefill", addresses[0], "--decode", addresses[1], "--max-concurrent-requests", str(places)]
        argv += ["--exit-with-parent"]
        router = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        stack.callback(router.kill)
        assert router.stdout is not None, "it was started with a pipe"
        for line in router.stdout:
            if line.strip() == "router: ready":
                break
        else:
            raise SystemExit("the router ended before it was ready")
        process = psutil.Process(router.pid)
        yield Deployment(process, f"127.0.0.1:{port}", f"127.0.0.1:{http_port}", workers, records)


def _words(directory: Path) -> list[int]:
    """Tokens that are a space and letters, so that they can be counted in a text by their spaces."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = ((token, tokenizer.decode([token])) for token in range(1000, 20_000))
    words = [token for token, text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
    assert len(words) > 500, f"{directory} has a tokenizer without words"
    return words


# ---- the parts --------------------------------------------------------------------------------------------------


def load(door: str, target: Deployment, directory: Path, name: str, **options: float) -> dict[str, Any]:
    """One part's streams, and what they cost the router."""
    out = directory / f"{name}.json"
    argv = [sys.executable, "-m", "benchmarks.router_load", door, target.grpc if door == "grpc" else target.http]
    argv += [f"--{key}={value}" for key, value in options.items()]
    before = _cpu(target.router)
    subprocess.run([*argv, f"--first={FIRST[name]}", f"--out={out}"], check=True)
    used = _cpu(target.router) - before
    answer: dict[str, Any] = json.loads(out.read_text())
    streams = list(answer["streams"].values())
    tokens = sum(words for stream in streams for _, words in stream["news"])
    seconds = max(stream["ended"] for stream in streams) - min(stream["began"] for stream in streams)
    return {
        "streams": len(streams),
        "complete": sum(sum(words for _, words in each["news"]) == options["tokens"] for each in streams),
        "refused": sum(bool(each["refused"]) for each in streams),
        "most_at_once": _most_at_once(streams),
        "tokens": tokens,
        "tokens_per_s": rate(streams),
        "chunks": sum(len(stream["news"]) for stream in streams),
        "router_us_per_token": used / max(1, tokens) * 1e6,
        "router_share_of_a_core": used / seconds,
        "client_share_of_a_core": answer["cpu"] / seconds,
        "raw": answer["streams"],
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def rate(streams: Sequence[dict[str, Any]]) -> float:
    """Tokens a second while every stream was open, or of the whole part where that is less than a quarter of it: a
    moment may lie between two tokens."""
    since, until = max(stream["began"] for stream in streams), min(stream["ended"] for stream in streams)
    first, last = min(stream["began"] for stream in streams), max(stream["ended"] for stream in streams)
    if until - since < (last - first) / 4:
        since, until = first, last
    return sum(words for stream in streams for at, words in stream["news"] if since <= at < until) / (until - since)


def _most_at_once(streams: Sequence[dict[str, Any]]) -> int:
    moments = sorted([(each["began"], 1) for each in streams] + [(each["ended"], -1) for each in streams])
    now = most = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def held_back(raw: dict[str, Any], sent: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds from the worker's step to the client's receipt, of every token from the second on."""
    delays = []
    for stream, taken in raw.items():
        came = [at for at, words in taken["news"] for _ in range(words)]
        delays += [1e3 * (at - since) for at, since in zip(came[1:], sent.get(stream, ()), strict=False)]
    delays.sort()
    if not delays:
        return {}
    return {
        "held_ms_p50": delays[len(delays) // 2],
        "held_ms_p99": delays[len(delays) * 99 // 100],
        "held_ms_max": delays[-1],
    }


async def refusal(target: Deployment, places: int) -> dict[str, Any]:
    """With every place taken: what one more gets at each door, and how soon."""
    channel, method = router_load.open_method(target.grpc)
    streams = range(FIRST["full"], FIRST["full"] + places)
    filling = [asyncio.ensure_future(router_load.over_grpc(method, stream, 4000, every=8)) for stream in streams]
    await asyncio.sleep(6)
    answer: dict[str, Any] = {"places": places}
    reader = await router_load.connect(target.http)
    for door in ("grpc", "http"):
        tries = []
        for number in range(5):
            stream = FIRST["one"] + number
            if door == "grpc":
                tries.append(await router_load.over_grpc(method, stream, 8))
            else:
                tries.append(await reader.request(router_load.http_request(stream, 8)))
            await asyncio.sleep(0.05)
        answer[door] = {
            "answers": sorted({each.refused or "taken" for each in tries}),
            "ms_median": statistics.median(1e3 * (each.ended - each.began) for each in tries),
            "ms_max": max(1e3 * (each.ended - each.began) for each in tries),
        }
    for each in filling:
        each.cancel()
    await asyncio.gather(*filling, return_exceptions=True)
    reader.close()
    await channel.close()
    return answer


async def first_tokens(target: Deployment, times: int) -> dict[str, float]:
    """Milliseconds to the first token, one request at a time, the doors in turn."""
    channel, method = router_load.open_method(target.grpc)
    reader = await router_load.connect(target.http)
    taken: dict[str, list[float]] = {"grpc": [], "http": []}
    for number in range(times):
        stream = FIRST["one"] + 10 + number
        over_grpc = await router_load.over_grpc(method, stream, 2)
        over_http = await reader.request(router_load.http_request(stream + times, 2))
        first = next(at for at, data in over_grpc.news if router_load.words_in_message(data))
        taken["grpc"].append(1e3 * (first - over_grpc.began))
        first = next(at for at, data in over_http.news if router_load.words_in_events(data))
        taken["http"].append(1e3 * (first - over_http.began))
    reader.close()
    await channel.close()
    medians = {door: statistics.median(each) for door, each in taken.items()}
    return {
        **{f"{door}_ms_p50": median for door, median in medians.items()},
        "added": medians["http"] - medians["grpc"],
    }


async def leaving(target: Deployment, times: int) -> dict[str, float]:
    """When the client of each stream left it, in the middle: the doors in turn, by stream."""
    channel, method = router_load.open_method(target.grpc)
    left = {}
    for number in range(0, 2 * times, 2):
        stream = FIRST["left"] + number
        call = method(router_load.grpc_request(stream, 4000))
        for _ in range(5):
            await call.read()
        left[str(stream)] = time.monotonic()
        call.cancel()
        reader = await router_load.connect(target.http)
        answer = asyncio.ensure_future(reader.request(router_load.http_request(stream + 1, 4000)))
        await asyncio.sleep(0.1)
        left[str(stream + 1)] = time.monotonic()
        reader.close()
        await answer
    await asyncio.sleep(0.5)
    await channel.close()
    return left


def until_cancelled(left: dict[str, float], cancelled: dict[str, float]) -> dict[str, Any]:
    """Milliseconds until the decode worker knew; it frees the blocks after the step that runs."""
    waits = {stream: 1e3 * (cancelled[stream] - at) for stream, at in left.items() if stream in cancelled}
    return {
        "streams": len(left),
        "cancelled": len(waits),
        "grpc_ms_max": max(wait for stream, wait in waits.items() if int(stream) % 2 == 0),
        "http_ms_max": max(wait for stream, wait in waits.items() if int(stream) % 2 == 1),
    }


# ---- the whole --------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    parts = arguments.parts.split(",")
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with deployment(arguments.model, directory, PLACES) as target:
            if "ttft" in parts:
                results["first_token"] = uvloop.run(first_tokens(target, 200))
            if "left" in parts:
                left = uvloop.run(leaving(target, 20))
            for door, streams in (("grpc", 250), ("http", 125)):
                if door in parts:
                    tokens = 32 * arguments.seconds
                    results[door] = load(door, target, directory, door, streams=streams, tokens=tokens, ramp=1)
            if "thousand" in parts:
                results["thousand"] = load(
                    "grpc", target, directory, "thousand", streams=1000, tokens=40, every=8, ramp=2
                )
            if "refusal" in parts:
                results["refusal"] = uvloop.run(refusal(target, PLACES))
            record = target.records_of(1)
    if "left" in parts:
        results["left"] = until_cancelled(left, record["cancelled"])
    for name in ("grpc", "http", "thousand"):
        if name in results:
            results[name] |= held_back(results[name].pop("raw"), record["sent"])
    return results


def show(results: dict[str, Any]) -> None:
    for part, values in results.items():
        if not isinstance(values, dict):
            print(f"{part:14} {values}")
            continue
        shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in values.items()}
        print(f"{part:14} " + ", ".join(f"{key} {value}" for key, value in shown.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer it is")
    parser.add_argument("--seconds", type=int, default=10, help="how long each stream lasts, at 32 tokens a second")
    parser.add_argument("--parts", default="ttft,left,grpc,http,thousand,refusal", help="which, separated by commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.time()
    results = measure(arguments)
    results["command"] = " ".join(["python -m benchmarks.router", *sys.argv[1:]])
    results["seconds"] = round(time.time() - began, 1)
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
