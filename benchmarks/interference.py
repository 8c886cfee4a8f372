"""Long prompts against decoding on one device: both stages in one process, as `python -m shared_service` runs them.

    python -m benchmarks.interference --json benchmarks/results/interference-h200.json

Sequences decode steadily from 1,024-token prompts; then a prompt of 8,192 tokens arrives each second and asks for one
token. Printed are the gaps between tokens of the steady ones without and with the prompts, and the prompts' time to
first token, at the engine: no router, no HTTP, as vLLM's figures beside them were taken.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from decode_service.decoder import Decoder
from engine.blocks import BlockPool
from engine.config import EngineConfig, ModelConfig
from engine.device_thread import DeviceThread
from engine.kv_cache import kv_layout
from engine.loader.random_shapes import SHAPES
from engine.messages import (
    DecodeStart,
    Failed,
    FirstToken,
    Node,
    PrefillAccepted,
    PrefillStart,
    Refused,
    RequestKey,
    RouterHello,
    StepBatch,
)
from engine.models.llama import Llama
from engine.types import SamplingParams
from prefill_service.prefiller import Prefiller
from shared_service.config import ROLE
from shared_service.driver import SharedDriver
from shared_service.pace import INTERVAL, TURN, Chunks, Pace
from shared_service.servicer import LEAST_CHUNK, MOST_CHUNK, runner_beside, warm_up
from wire import logs
from wire.garbage import spare_collections
from wire.observer import Observer
from wire.session import Outbound

VLLM = {"gap_p50_ms": 8.21, "gap_p99_ms": 61.0, "gap_max_ms": 64.8, "p99_over_p50": 7.4, "ttft_p50_ms": 263}
BLOCK = 16


@dataclass(slots=True, eq=False)
class Request:
    """When each token came. `over` is set with the last one."""

    prompt: Sequence[int]
    params: SamplingParams
    began: float
    times: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Feeder:
    """The router's part for a SharedDriver in this process."""

    def __init__(self, driver: SharedDriver) -> None:
        self._streams = driver.prefill.stream(), driver.decode.stream()
        self._requests: dict[int, Request] = {}
        self._reading: list[asyncio.Task[None]] = []
        for stream in self._streams:
            outbound: Outbound[Any] = Outbound()
            stream.session_opened(RouterHello("benchmark", 1, 1), outbound)
            self._reading.append(asyncio.create_task(self._read(outbound)))

    def start(self, prompt: Sequence[int], tokens: int) -> Request:
        params = SamplingParams(temperature=0, seed=0, max_tokens=tokens, ignore_eos=True)
        request = Request(prompt, params, time.perf_counter())
        number = len(self._requests) + 1
        self._requests[number] = request
        self._streams[0].session_command(1, PrefillStart(RequestKey(number, 1), prompt, 0, params, 600.0, 0.0))
        return request

    def stop(self) -> None:
        for stream in self._streams:
            stream.session_closed(1, Outbound())
        for task in self._reading:
            task.cancel()

    async def _read(self, outbound: Outbound[Any]) -> None:
        async for event in outbound.drain():
            self._on_event(event)

    def _on_event(self, event: Any) -> None:
        match event:
            case PrefillAccepted():
                request = self._requests[event.key.request]
                if (request.params.max_tokens or 0) > 1:
                    key = event.key._replace(placement=1)
                    start = DecodeStart(
                        key, event.ticket, request.prompt, 0, request.params, 600.0, 0.0, until_index=1 << 30
                    )
                    self._streams[1].session_command(1, start)
            case FirstToken():
                self._token(event.key, event.token.index, event.finish_reason is not None)
            case StepBatch():
                ends = {finish.key for finish in event.finishes}
                for key, token in event.rows:
                    self._token(key, token.index, key in ends)
            case Failed() | Refused():
                raise RuntimeError(f"request {event.key.request} failed: {event.reason.name} {dict(event.facts)}")

    def _token(self, key: RequestKey, index: int, last: bool) -> None:
        request = self._requests[key.request]
        if index == len(request.times):  # token 0 comes from both stages
            request.times.append(time.perf_counter())
        if last:
            request.over.set()


def on_card(shape: str, config: EngineConfig) -> tuple[Any, Any, int]:
    """Runners of prompts and of rows, over one copy of random weights and one cache; and what the model knows."""
    from benchmarks.engine_gpu import tensors_of
    from engine.backend.cuda import Gpu
    from engine.cuda_cache import CudaKVCache
    from engine.cuda_runner import CudaRunner

    gpu, model = Gpu(), ModelConfig.from_dict(SHAPES[shape])
    weights = Llama(model, dict(tensors_of(model)))
    layout = kv_layout(model, b"random", "bfloat16", BLOCK, "")
    rows = CudaRunner(weights, config, CudaKVCache(layout, config.num_blocks, gpu), gpu)
    rows.cache.zero([0])
    rows.warm_up()
    return runner_beside(rows), rows, model.vocab_size


def on_cpu(shape: str, config: EngineConfig) -> tuple[Any, Any, int]:
    from engine.backend.cpu import CPUBackend
    from engine.kv_cache import KVCache
    from engine.loader.random_weights import random_tensors
    from engine.runner import ModelRunner

    torch.set_num_threads(1)
    model = ModelConfig.from_dict(SHAPES[shape])
    weights = Llama(model, random_tensors(model, 0, torch.float32, lambda *_: None))
    layout = kv_layout(model, b"random", "float32", BLOCK, "")
    runner = ModelRunner(weights, config, KVCache(layout, config.num_blocks), CPUBackend())
    return runner, runner, model.vocab_size


class Bench:
    """One deployment in this process. Prompts are random: none is found in the prefix cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.on_card = options, options.device == "cuda"
        steady, long = options.prompt + options.tokens, options.long
        blocks = options.sequences * (steady // BLOCK + 4) + 6 * (long // BLOCK + 2)
        self.config = EngineConfig(
            block_size=BLOCK, num_blocks=blocks, max_num_seqs=options.sequences,
            max_num_batched_tokens=options.max_num_batched_tokens[0], max_model_len=max(steady, long) + BLOCK,
            dtype="bfloat16" if self.on_card else "float32",
        )  # fmt: skip
        self.prompts, self.rows, self.vocab = (on_card if self.on_card else on_cpu)(options.shape, self.config)
        self.device = DeviceThread("shared")
        self.beside = DeviceThread("prompts") if self.on_card else self.device
        self._rng = random.Random(0)

    def ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self.vocab) for _ in range(count)]

    async def use(self, tokens: int) -> None:
        """Of a prompt in one step, from here on."""
        self.config = replace(self.config, max_num_batched_tokens=tokens)
        if self.on_card:
            self.prompts.use(self.prompts.cache, self.config)
            await self.beside.run(warm_up, self.prompts)

    def driver(self, share: float) -> SharedDriver:
        most, depth = self.config.max_num_batched_tokens, self.rows.depth if self.on_card else 1
        node, pool = Node("shared", 1, "in-process:0"), BlockPool(self.config.num_blocks)
        layout, eos = self.rows.cache.layout, self.rows.eos_token_ids
        decoder = Decoder(
            node, layout, self.config, pool, vocab_size=self.vocab, eos_token_ids=eos, transport="local", depth=depth
        )
        prefiller = Prefiller(
            node, layout, self.config, pool, vocab_size=self.vocab, eos_token_ids=eos, rng=random.Random(1),
            digests=False, promises=decoder, depth=depth,
        )  # fmt: skip
        observers = Observer("decode"), Observer("prefill")
        if self.on_card:
            driver = SharedDriver(Chunks(most, most), Pace(share))
            driver.decodes(decoder, self.rows, self.device, self.rows, observers[0], self.rows.card_times)
            driver.prefills(prefiller, self.prompts, self.beside, self.prompts, observers[1])
        else:
            driver = SharedDriver(Chunks(LEAST_CHUNK, min(most, MOST_CHUNK), share), Pace(0.0))
            driver.decodes(decoder, self.rows, self.device, None, observers[0])
            driver.prefills(prefiller, self.prompts, self.device, None, observers[1])
        return driver

    async def phase(self, share: float, long_prompts: bool) -> dict[str, Any]:
        options, driver = self.options, self.driver(share)
        prompts = [self.ids(options.long) for _ in range(options.seconds)]
        running = asyncio.create_task(driver.run())
        feeder = Feeder(driver)
        steady = [feeder.start(self.ids(options.prompt), options.tokens) for _ in range(options.sequences)]
        while min(len(one.times) for one in steady) < min(30, options.tokens // 2):
            await asyncio.sleep(0.02)
            if running.done():
                running.result()
        if self.on_card:
            self.rows.card_times.clear()
        began = time.perf_counter()
        found: list[Request] = []
        for second, prompt in enumerate(prompts):
            if long_prompts:
                found.append(feeder.start(prompt, 1))
            await asyncio.sleep(max(0.0, began + second + 1 - time.perf_counter()))
        ended = time.perf_counter()
        left = [one.times[-1] for one in steady]
        steps = list(self.rows.card_times) if self.on_card else []
        async with asyncio.timeout(60):
            for one in found:
                await one.over.wait()
        assert min(left) > ended - 1, "the steady sequences ended too early: raise --tokens"
        feeder.stop()
        while not (driver.prefiller.idle and driver.decoder.idle):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        return {**self._figures(share, steady, found, began, ended), **on_its_clock(steps)}

    def _figures(
        self, share: float, steady: list[Request], found: list[Request], began: float, ended: float
    ) -> dict[str, Any]:
        pairs = [pair for one in steady for pair in zip(one.times, one.times[1:], strict=False)]
        gaps = sorted(1e3 * (after - before) for before, after in pairs if began <= after <= ended)
        waits = sorted(1e3 * (one.times[0] - one.began) for one in found)
        p50, p99, most = _at(gaps, 0.5), _at(gaps, 0.99), self.config.max_num_batched_tokens
        figures = {
            "long_prompts": len(found), "share": share, "max_num_batched_tokens": most, "gap_p50_ms": p50,
            "gap_p99_ms": p99, "gap_max_ms": gaps[-1], "p99_over_p50": p99 / p50,
            "tokens_per_s": len(gaps) / (ended - began), "ttft_p50_ms": _at(waits, 0.5) if waits else None,
            "ttft_max_ms": waits[-1] if waits else None,
        }  # fmt: skip
        print(
            f"  share {share:g}, at most {most} tokens, {len(found)} long prompts: gap p50 {p50:.2f} p99 {p99:.2f} "
            f"max {gaps[-1]:.1f} ms, p99/p50 {p99 / p50:.2f}, {figures['tokens_per_s']:.0f} tokens/s"
            + (f", first token p50 {_at(waits, 0.5):.0f} max {waits[-1]:.0f} ms" if waits else ""),
            flush=True,
        )
        return figures


def on_its_clock(steps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """How long decode steps took a card, and how long it was from one's beginning to the next one's, in ms."""
    if len(steps) < 2:
        return {}
    took = sorted(1e-6 * (ended - began) for began, ended in steps)
    apart = sorted(1e-6 * (after - before) for (before, _), (after, _) in itertools.pairwise(steps))
    found = {
        f"{name}_{label}_ms": _at(values, at)
        for name, values in (("step", took), ("begin_to_begin", apart))
        for label, at in (("p50", 0.5), ("p80", 0.8), ("p99", 0.99), ("max", 1.0))
    }
    said = ", ".join(f"{name.removesuffix('_ms')} {value:.1f}" for name, value in found.items())
    print(f"    on the card's clock, ms: {said}", flush=True)
    return found


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(options)
    spare_collections()
    print(f"{options.shape}, {options.sequences} sequences; vLLM on one H200: {VLLM}", flush=True)
    shares = options.shares or [INTERVAL if bench.on_card else TURN]
    found: list[dict[str, Any]] = []
    for tokens in options.max_num_batched_tokens:
        await bench.use(tokens)
        if not found:
            found.append(await bench.phase(shares[0], False))
        found += [await bench.phase(share, True) for share in shares]
    bench.device.close()
    bench.beside.close()
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--sequences", type=int, default=64)
    made.add_argument("--prompt", type=int, default=1024)
    made.add_argument("--tokens", type=int, default=2000, help="of a steady sequence: enough for all seconds")
    made.add_argument("--long", type=int, default=8192)
    made.add_argument("--seconds", type=int, default=8)
    made.add_argument("--max-num-batched-tokens", type=int, nargs="+", default=[ROLE.max_num_batched_tokens])
    made.add_argument("--shares", type=float, nargs="+", help="decode steps: on a card from one's launch to the next "
                      "one's beside a prompt, on the CPU what a chunk may take")  # fmt: skip
    made.add_argument("--json", type=Path, help="where the figures go")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logs.configure("benchmark", "warning")
    found = uvloop.run(measure(options))
    if options.json:
        cuda = options.device == "cuda"
        record = {
            "command": " ".join(["python -m benchmarks.interference", *(arguments or sys.argv[1:])]),
            "card": torch.cuda.get_device_name() if cuda else "none", "torch": torch.__version__,
            "vllm_one_h200": VLLM, "phases": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
