"""What landings of KV blocks do to the decode steps that run meanwhile, on this CPU.

Decode steps of a real engine run back to back on their own thread, first alone, then while blocks land one pull after
the other: --size bytes each, --rate a second (0: as fast as they can). `python -m benchmarks.landings` prints step
times without and with landings, and how much landed. Owner, puller and engine share this process; the owner's half of
a pull is a few messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.transfer import BLOCK_SIZE, PATHS, Bench
from engine.batch import Batch, Row, SampleInput
from engine.device_thread import DeviceThread
from engine.messages import KvLayout
from engine.types import SamplingParams
from kvtransfer.startup import Engine, assemble
from prefill_service.config import ROLE
from wire import logs
from wire.flags import parse_bytes
from wire.options import parse

CONTEXT = 256  # tokens that each sequence has


class Steps(NamedTuple):
    """Seconds."""

    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Steps:
        ranked = sorted(seconds)
        return cls(statistics.median(ranked), ranked[int(0.99 * (len(ranked) - 1))], ranked[-1])

    def __str__(self) -> str:
        return f"step p50 {1e3 * self.p50:6.2f} ms, p99 {1e3 * self.p99:6.2f} ms, longest {1e3 * self.longest:6.2f} ms"


class Decoding:
    """A batch of sequences that make one token per step, always the same one: only its time is of interest."""

    def __init__(self, engine: Engine, sequences: int) -> None:
        self._runner = engine.runner
        per_sequence = CONTEXT // BLOCK_SIZE + 1
        params = SamplingParams(temperature=0, seed=0, max_tokens=1000)
        self._rows = [
            Row(
                slot,
                [1],
                CONTEXT,
                range(slot * per_sequence, (slot + 1) * per_sequence),
                SampleInput(params, 0, [1] * CONTEXT, []),
            )
            for slot in range(sequences)
        ]

    def run(self, seconds: float) -> list[float]:
        """Blocks its thread."""
        times, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            self._runner.step(Batch(rows=list(self._rows)))
            times.append(time.perf_counter() - began)
        return times


async def measure(
    path: str, size: int, block: int, decoding: Decoding, seconds: float, rate: float
) -> dict[str, object]:
    layout = KvLayout(b"benchmark", "bytes", BLOCK_SIZE, 1, 1, 1, block, "")
    bench = Bench(path, layout, size // block, digests=True)
    device = DeviceThread("decode")
    await bench.start()
    try:
        await device.run(decoding.run, 1.0)
        alone, beside, landed = [], [], []
        for _ in range(3):  # in turn, so that whatever else the machine does meets both
            alone += await device.run(decoding.run, seconds / 3)
            stepping = asyncio.create_task(device.run(decoding.run, seconds / 3))
            while not stepping.done():
                began = time.monotonic()
                landed.append(await bench.pull(bench.num_blocks))
                await asyncio.sleep(max(0.0, 1 / rate - (time.monotonic() - began)) if rate else 0)
            beside += await stepping
    finally:
        await bench.stop()
        device.close()
    without, with_them = Steps.of(alone), Steps.of(beside)
    print(f"alone              {without}   {len(alone)} steps")
    print(f"with landings      {with_them}   {len(beside)} steps")
    moved = len(landed) * bench.bytes
    print(
        f"{bench.path}: {len(landed)} landings of {bench.bytes} bytes, {moved / seconds / 1e6:.0f} MB/s, "
        f"median {1e3 * statistics.median(landed):.1f} ms; p50 {with_them.p50 / without.p50:.2f} and "
        f"p99 {with_them.p99 / without.p99:.2f} times as long"
    )
    return {
        "alone": without._asdict(),
        "with_landings": with_them._asdict(),
        "landings": len(landed),
        "bytes_each": bench.bytes,
        "landing_p50": statistics.median(landed),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode steps on this CPU without and with landings of KV blocks.")
    parser.add_argument("--model", default="random:smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0, help="of steps alone, and as long with landings")
    parser.add_argument("--path", choices=PATHS, default="memfd")
    parser.add_argument("--size", type=parse_bytes, default=32 << 20)
    parser.add_argument("--block", type=parse_bytes, default=1 << 20)
    parser.add_argument("--rate", type=float, default=4.0, help="landings a second; 0 is one after the other")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    logs.configure("landings", "warning")
    argv = ["--model", given.model, "--threads", str(given.threads), "--kv-memory", "512MiB", "--transport", "grpc"]
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker has it, before torch is loaded
    engine = assemble(parse(ROLE, argv, {}), lambda phase: None)
    decoding = Decoding(engine, given.sequences)
    found = asyncio.run(measure(given.path, given.size, given.block, decoding, given.seconds, given.rate))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
