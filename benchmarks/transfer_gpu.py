"""KV blocks from card to card by CUDA IPC: our kernel beside a raw copy kernel and the driver's copies, and handovers.

    python -m benchmarks.transfer_gpu --json benchmarks/results/transfer-h200.json

The owner is another process, on this card and, where there is a second one, on that: then the way is NVLink. GB/s are
bytes copied, once, over the time from the launch to the end on the card, ours with digests; `whole` is a call of the
engine's, from lists of ids on the host to digests on the host. --handover starts a deployment,
`pagewire up` with one worker of each kind or --shared, and reports the time from a client's first token to its second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.backend import launches
from engine.backend.cuda import Address, Gpu
from engine.config import ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_copies import CTAS
from engine.loader.random_shapes import SHAPES
from engine.messages import KvLayout
from engine.types import SamplingParams
from wire import logs

BLOCK_BYTES = 2 << 20  # 16 tokens of the Llama-3-8B shape in bfloat16
COUNTS = (1, 64, 256)
ROUNDS = 15
PEERS = {
    "same card": {"nixl": {64: 236, 256: 197}, "raw kernel": {64: 1780, 256: 1936}, "must reach": {256: 1700}},
    "NVLink": {"nixl": {64: 125, 256: 182}, "raw kernel": {64: 364, 256: 372}, "must reach": {64: 300, 256: 340}},
}
_AHEAD = 500_000  # cycles for which the card waits, so that the host has launched before it begins
PROMPT = 4096  # tokens of a handover
PORT = 50551


def layout_of(block_bytes: int) -> KvLayout:
    return KvLayout(b"benchmark", "bfloat16", 16, 32, 8, block_bytes // (32 * 2 * 8 * 16 * 2), block_bytes, "")


def own(card: int, blocks: int) -> int:
    """The owner's process: says its pool's handle and the sums of its blocks, and lives until its input ends."""
    torch.cuda.set_device(card)
    cache = CudaKVCache(layout_of(BLOCK_BYTES), blocks, Gpu())
    cache._raw.copy_(torch.randint(0, 256, (blocks, BLOCK_BYTES), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    print(json.dumps({"handle": cache.export().hex(), "sums": cache.copies.sums(range(blocks))}), flush=True)
    sys.stdin.read()
    return 0


class Link:
    """Copies from one owner into this process's pool."""

    def __init__(self, gpu: Gpu, card: int, blocks: int) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer_gpu", "--own", str(card), "--blocks", str(blocks)]
        self._owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._owner.stdout, "it is a pipe"
        said = json.loads(self._owner.stdout.readline())
        self.sums, self._blocks = said["sums"], blocks
        self.cache = CudaKVCache(layout_of(BLOCK_BYTES), blocks, gpu)
        began = time.perf_counter()
        self.source = self.cache.open(bytes.fromhex(said["handle"]))
        self.open_ms = 1e3 * (time.perf_counter() - began)
        self.gpu = self.cache.copies._gpu
        self.rng = random.Random(0)
        self.sums_on_card = torch.zeros(2 * blocks, dtype=torch.int32, device="cuda")

    def close(self) -> None:
        self.cache.close(self.source)
        self._owner.communicate()

    def ids(self, count: int) -> tuple[list[int], list[int]]:
        return self.rng.sample(range(self._blocks), count), self.rng.sample(range(self._blocks), count)

    def check(self, count: int) -> None:
        """What arrives is what the owner has."""
        from_ids, to_ids = self.ids(count)
        sums = self.cache.copies.copy(self.source, from_ids, to_ids)
        assert sums == [self.sums[block] for block in from_ids] == self.cache.copies.sums(to_ids), "wrong bytes"

    # ---- ways -----------------------------------------------------------------------------------------------------

    def ours(self, to: torch.Tensor, origin: torch.Tensor, ctas: int) -> None:
        self.sums_on_card.zero_()
        launch = launches.copy_and_digest(BLOCK_BYTES, len(to), ctas)
        raw = self.cache._raw
        self.gpu.launch(launch, raw, Address(self.source), to, origin, self.sums_on_card, len(to), overlap=False)

    def raw_kernel(self, to: torch.Tensor, origin: torch.Tensor) -> None:
        launch = launches.copy_blocks(BLOCK_BYTES, len(to))
        self.gpu.launch(launch, self.cache._raw, Address(self.source), to, origin, overlap=False)

    def per_block(self, from_ids: list[int], to_ids: list[int]) -> None:
        first = self.cache._raw.data_ptr()
        for source, target in zip(from_ids, to_ids, strict=True):
            self._memcpy(first + target * BLOCK_BYTES, self.source + source * BLOCK_BYTES, BLOCK_BYTES)

    def one_copy(self, count: int) -> None:
        self._memcpy(self.cache._raw.data_ptr(), self.source, count * BLOCK_BYTES)

    def _memcpy(self, target: int, source: int, size: int) -> None:
        self.gpu._check(self.gpu._driver.cuMemcpyAsync(target, source, size, self.gpu._stream))

    # ---- figures --------------------------------------------------------------------------------------------------

    def gbps(self, count: int, way: Callable[[list[int], list[int]], None]) -> float:
        """Median over rounds with other blocks each time, so that no cache helps."""
        took = []
        for _ in range(ROUNDS + 2):
            ids = self.ids(count)
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with self.gpu.on_stream():
                torch.cuda._sleep(_AHEAD)
                began.record()
                way(*ids)
                ended.record()
            ended.synchronize()
            took.append(began.elapsed_time(ended) / 1e3)
        return count * BLOCK_BYTES / statistics.median(took[2:]) / 1e9

    def whole(self, count: int) -> float:
        took = []
        for _ in range(ROUNDS + 2):
            from_ids, to_ids = self.ids(count)
            began = time.perf_counter()
            self.cache.copies.copy(self.source, from_ids, to_ids)
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:]) * 1e6

    def on_lists(self, count: int, raw: Callable[[torch.Tensor, torch.Tensor], None]) -> float:
        lists = [tuple(self.gpu.to_device(ids) for ids in self.ids(count)) for _ in range(4)]
        torch.cuda.synchronize()
        turn = iter(range(1 << 30))

        def way(from_ids: list[int], to_ids: list[int]) -> None:
            origin, to = lists[next(turn) % len(lists)]
            raw(to, origin)

        return self.gbps(count, way)

    def measure(self, kind: str, sweep: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {"open_ms": self.open_ms, "ctas": CTAS, "counts": {}, "peers": PEERS[kind]}
        print(f"{kind}: opened in {self.open_ms:.1f} ms, {CTAS} thread blocks; peers {PEERS[kind]}", flush=True)
        for count in COUNTS:
            self.check(count)
            figures = {
                "ours_gbps": self.on_lists(count, lambda to, origin: self.ours(to, origin, CTAS)),
                "raw_kernel_gbps": self.on_lists(count, self.raw_kernel),
                "memcpy_per_block_gbps": self.gbps(count, self.per_block),
                "one_memcpy_gbps": self.gbps(count, lambda origin, _: self.one_copy(len(origin))),
                "whole_us": self.whole(count),
            }
            found["counts"][count] = figures
            print(f"  {count:3d} blocks: " + ", ".join(f"{name} {value:.0f}" for name, value in figures.items()),
                  flush=True)  # fmt: skip
        found["sweep_256_gbps"] = {
            ctas: self.on_lists(256, lambda to, origin, ctas=ctas: self.ours(to, origin, ctas))  # type: ignore[misc]
            for ctas in sweep
        }
        by_ctas = ", ".join(f"{ctas}: {value:.0f}" for ctas, value in found["sweep_256_gbps"].items())
        print(f"  256 blocks by thread blocks: {by_ctas}", flush=True)
        return found


# ---- beside decode steps ------------------------------------------------------------------------------------------


async def beside_steps(gpu_link: Link, shape: str) -> dict[str, Any]:
    """Gaps of 64 decoding sequences alone, and while an 8,192-token prompt lands each second, in 16 chunks."""
    from benchmarks import interference

    options = interference.parser().parse_args(["--shape", shape, "--seconds", "4", "--tokens", "1300"])
    bench = interference.Bench(options)
    alone = await bench.phase(0.0, False)

    def land(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> list[float]:
        took = []
        while not stop.is_set():
            for _ in range(16):
                ids = gpu_link.ids(32)
                began = time.perf_counter()
                gpu_link.cache.copies.copy(gpu_link.source, *ids)
                took.append(1e6 * (time.perf_counter() - began))
                time.sleep(0.02)
            time.sleep(0.66)
        return took

    stop = asyncio.Event()
    landing = asyncio.create_task(asyncio.to_thread(land, stop, asyncio.get_running_loop()))
    beside = await bench.phase(0.0, False)
    stop.set()
    took = sorted(await landing)
    bench.device.close()
    landed = {"copies": len(took), "p50_us": took[len(took) // 2], "p99_us": took[len(took) * 99 // 100]}
    print(f"  32 blocks landing beside steps: {landed}", flush=True)
    return {"alone": alone, "with_landings": beside, "landing_of_32_blocks": landed}


# ---- handover -----------------------------------------------------------------------------------------------------


async def handover(flags: Sequence[str], shape: str, prompts: int) -> dict[str, Any]:
    """Of a deployment that is started here: milliseconds from a client's first token to its second, one at a time."""
    from pagewire.answers import PagewireError
    from pagewire.client import AsyncClient

    ports = [f"--{name}={PORT + i}" for i, name in enumerate(("port", "http-port", "prefill-port", "decode-port"))]
    command = [sys.executable, "-m", "pagewire", "up", "--model", f"random:{shape}", *ports, *flags]
    deployment = subprocess.Popen(command, start_new_session=True)
    rng, gaps, firsts = random.Random(0), list[float](), list[float]()
    vocabulary = ModelConfig.from_dict(SHAPES[shape]).vocab_size
    try:
        async with AsyncClient(f"127.0.0.1:{PORT}") as client:
            deadline = time.monotonic() + 240
            while True:
                try:
                    if len((await client.server_info(timeout=1)).workers) > 1 and await client.models(timeout=1):
                        break
                except PagewireError:
                    pass
                if deployment.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the deployment did not start")
                await asyncio.sleep(0.2)
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            for _ in range(prompts):
                prompt = [rng.randrange(3, vocabulary) for _ in range(PROMPT)]
                began, times = time.perf_counter(), list[float]()
                async for delta in client.stream(prompt, params, timeout=60):
                    times += [time.perf_counter()] * len(delta.token_ids)
                firsts.append(1e3 * (times[0] - began))
                gaps.append(1e3 * (times[1] - times[0]))
            info = await client.server_info(timeout=5)
    finally:
        os.killpg(deployment.pid, signal.SIGTERM)
        deployment.wait(60)
    gaps, firsts = sorted(gaps[2:]), sorted(firsts[2:])
    found = {
        "flags": list(flags), "prompt": PROMPT, "first_to_second_p50_ms": gaps[len(gaps) // 2],
        "first_to_second_max_ms": gaps[-1], "ttft_p50_ms": firsts[len(firsts) // 2],
        "paths": [worker.kv_path or ", ".join(worker.transports) for worker in info.workers],
    }  # fmt: skip
    print(f"  handover {' '.join(flags)}: {found}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=int, metavar="CARD", help="be the owner, on this card: for this program itself")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--sweep", type=int, nargs="*", default=[16, 32, 64, 96, 132, 264])
    parser.add_argument("--no-blocks", action="store_true", help="handovers alone")
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--steps", action="store_true", help="landings beside decode steps, too")
    parser.add_argument("--handover", action="append", metavar="FLAGS", help="of `pagewire up`, such as '--shared'")
    parser.add_argument("--prompts", type=int, default=12, help="of each handover; the first two warm up")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    logs.configure("benchmark", "warning")
    if options.own is not None:
        return own(options.own, options.blocks)
    cards = torch.cuda.device_count()
    record: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.transfer_gpu", *(arguments or sys.argv[1:])]),
        "card": torch.cuda.get_device_name() if cards else "none", "cards": cards, "torch": torch.__version__,
    }  # fmt: skip
    for card in range(0 if options.no_blocks else min(2, cards)):
        kind = "same card" if card == 0 else "NVLink"
        link = Link(Gpu(), card, options.blocks)
        record[kind] = link.measure(kind, options.sweep)
        if options.steps:
            record[kind]["beside_steps"] = asyncio.run(beside_steps(link, options.shape))
        link.close()
    for flags in options.handover or ():
        record.setdefault("handover", []).append(asyncio.run(handover(flags.split(), options.shape, options.prompts)))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
