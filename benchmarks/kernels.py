"""Kernels beside their floors and, where one is installed, their peers: one card, one run, all inside CUDA graphs.

    python -m benchmarks.kernels attention --json attention.json

Each figure is the median time between two events of a graph in which the L2 is flushed before every launch; ours and
the peer's replays alternate. The floor of a kernel is its bytes at the speed at which this card reads, measured in the
same run. Needs a CUDA device; the peer of attention is FlashInfer.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import plots
from engine.backend.nvcc import DEFAULT_CACHE_DIR

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backend.attention import Geometry

FLUSH_BYTES = 256 << 20
SAMPLES = 8  # launches in one graph
ROUNDS = 7
Launch = Callable[[], None]


# ---- the card -----------------------------------------------------------------------------------------------------


class Card:
    """A PyCUDA stream that torch works on too, a buffer that flushes the L2, and the speed at which the card reads."""

    def __init__(self, cache_dir: Path = DEFAULT_CACHE_DIR) -> None:
        import pycuda.driver as cuda
        import torch

        torch.zeros(1, device="cuda")
        cuda.init()
        device = cuda.Device(torch.cuda.current_device())
        context = device.retain_primary_context()
        context.push()
        atexit.register(context.pop)  # PyCUDA aborts on a context that is still pushed
        self.name = device.name()
        self.cache_dir = cache_dir
        self.stream = cuda.Stream()
        torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream.handle))
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.ceiling = 0.0

    def measure_ceiling(self, size: int = 8 << 30) -> float:
        """Bytes a second of a kernel that only reads."""
        import pycuda.driver as cuda
        import torch

        from engine.backend.nvcc import architecture, cubin, kernel

        arch = architecture(*cuda.Context.get_device().compute_capability())
        module = cuda.module_from_file(str(cubin(kernel("read_ceiling"), arch, self.cache_dir)))
        function = module.get_function("read_ceiling")
        function.prepare("PqP")
        data = torch.randint(-(1 << 62), 1 << 62, (size // 8,), device="cuda")
        never = torch.zeros(1, dtype=torch.int32, device="cuda")
        best = 0.0
        for blocks in (528, 1056):
            launch = _bind(
                function.prepared_async_call,
                (blocks, 1),
                (512, 1, 1),
                self.stream,
                data.data_ptr(),
                size // 16,
                never.data_ptr(),
            )
            best = max(best, size / timed([launch], self, samples=2)[0].median)
        self.ceiling = best
        return best


def _bind(function: Any, *arguments: Any) -> Launch:
    return lambda: function(*arguments)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one launch; `low` and `high` are the 10th and 90th percentiles."""

    median: float
    low: float
    high: float


def timed(launches: Sequence[Launch], card: Card, samples: int = SAMPLES, rounds: int = ROUNDS) -> list[Timing]:
    """One graph for each launch; replays alternate A B B A, so that a drifting clock meets all of them alike."""
    import torch

    graphs = []
    for launch in launches:
        launch()
        torch.cuda.synchronize()
        events = [
            (torch.cuda.Event(enable_timing=True, external=True), torch.cuda.Event(enable_timing=True, external=True))
            for _ in range(samples)
        ]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for first, last in events:
                card.flush.fill_(1)
                first.record()
                launch()
                last.record()
        graphs.append((graph, events))
    times: list[list[float]] = [[] for _ in launches]
    for turn in range(rounds + 1):  # the first warms up
        order = range(len(launches)) if turn % 2 else reversed(range(len(launches)))
        for index in order:
            graph, events = graphs[index]
            graph.replay()
            torch.cuda.synchronize()
            if turn:
                times[index].extend(first.elapsed_time(last) * 1e-3 for first, last in events)
    return [_timing(values) for values in times]


def _timing(values: list[float]) -> Timing:
    values = sorted(values)
    return Timing(statistics.median(values), values[len(values) // 10], values[len(values) * 9 // 10])


# ---- attention ----------------------------------------------------------------------------------------------------

# batch, context: one layer, 32 query heads, 8 KV heads, head dim 128, bfloat16, block size 16
ATTENTION_SHAPES = [
    (1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096), (8, 16384), (32, 1024), (32, 4096), (64, 1024), (64, 4096),
    (128, 1024), (128, 4096), (256, 1024), (256, 4096),
]  # fmt: skip
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_LAYERS, LAYER = 32, 1  # of the pool, as memory allows, and the one that is read
MAX_POOL = 16 << 30  # bytes


@dataclass(slots=True)
class AttentionFigure:
    """Microseconds; `share` is of the reading ceiling, `ratio` how many times as fast as the peer ours is."""

    name: str
    mib: float
    floor_us: float
    ours_us: float
    share: float
    plan_us: float
    peer_us: float | None = None
    ratio: float | None = None
    difference: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class AttentionCase:
    """A pool with shuffled blocks, and what is launched over it."""

    def __init__(
        self, card: Card, lengths: Sequence[int], block_size: int = 16, geometry: Geometry | None = None
    ) -> None:
        import torch

        from engine.backend.attention import AttentionShape, PagedAttention

        self.card = card
        self.lengths = list(lengths)
        self.block_size = block_size
        counts = [-(-n // block_size) for n in lengths]
        self.blocks = max(sum(counts), 1)
        layers = max(
            min(2, MAX_LAYERS), min(MAX_LAYERS, MAX_POOL // (self.blocks * 2 * KV_HEADS * block_size * HEAD_DIM * 2))
        )
        size = (self.blocks, layers, 2, KV_HEADS, block_size, HEAD_DIM)
        self.cache = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        self.cache[:, LAYER] = torch.randn(self.blocks, *size[2:], dtype=torch.bfloat16, device="cuda")
        self.q = torch.randn(len(counts), HEADS, HEAD_DIM, device="cuda").bfloat16()
        self.out = torch.full_like(self.q, math.nan)
        self.ids = torch.randperm(self.blocks).int()
        self.tables = torch.zeros(len(counts), max(*counts, 1), dtype=torch.int32)
        self.counts = counts
        for row, ids in enumerate(self.ids[: sum(counts)].split(counts)):
            self.tables[row, : len(ids)] = ids
        self.tables = self.tables.cuda()
        self.device_lengths = torch.tensor(self.lengths, dtype=torch.int32).cuda()
        shape = AttentionShape("bfloat16", HEAD_DIM, HEADS // KV_HEADS, block_size)
        self.attention = PagedAttention(shape, KV_HEADS, len(counts), geometry, card.cache_dir)

    @property
    def bytes(self) -> int:
        """Read and written at least once: K, V, q and out."""
        return 2 * 2 * (sum(self.lengths) * KV_HEADS * HEAD_DIM + len(self.lengths) * HEADS * HEAD_DIM)

    def plan(self) -> None:
        rows, width = self.tables.shape
        self.attention.plan(self.card.stream, self.device_lengths.data_ptr(), self.tables.data_ptr(), rows, width)

    def run(self) -> None:
        rows, width = self.tables.shape
        self.attention.run(
            self.card.stream,
            self.q.data_ptr(),
            self.q.stride(0),
            self.cache[0, LAYER].data_ptr(),
            self.cache.stride(0),
            self.out.data_ptr(),
            self.tables.data_ptr(),
            rows,
            width,
            HEAD_DIM**-0.5,
        )

    def peers(self) -> dict[str, tuple[Launch, Tensor]]:
        """FlashInfer over a contiguous layer with the same values: as planned for graphs, and as planned without."""
        try:
            import flashinfer
        except ImportError:
            return {}
        import torch

        keys = self.cache[:, LAYER, 0].transpose(1, 2).contiguous()
        values = self.cache[:, LAYER, 1].transpose(1, 2).contiguous()
        indptr = torch.tensor([0, *self.counts]).cumsum(0).int()
        last = torch.tensor([(n - 1) % self.block_size + 1 for n in self.lengths], dtype=torch.int32)
        launches = {}
        for graphs in (False, True):
            workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
            buffers = dict(
                paged_kv_indptr_buffer=indptr.cuda(),
                paged_kv_indices_buffer=self.ids.cuda(),
                paged_kv_last_page_len_buffer=last.cuda(),
            )
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=graphs, use_tensor_cores=True, **(buffers if graphs else {})
            )
            wrapper.plan(
                indptr.cuda(),
                self.ids.cuda(),
                last.cuda(),
                HEADS,
                KV_HEADS,
                HEAD_DIM,
                self.block_size,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
            out = torch.empty_like(self.q)
            launches["flashinfer graph plan" if graphs else "flashinfer"] = (
                _bind(lambda w, o: w.run(self.q, (keys, values), out=o), wrapper, out),
                out,
            )
        return launches


def measure_attention(name: str, case: AttentionCase, peers: bool = True) -> AttentionFigure:
    others = case.peers() if peers else {}
    case.plan()
    timings = timed([case.run, *(launch for launch, _ in others.values())], case.card)
    plan = timed([case.plan], case.card, rounds=3)[0]
    ours = timings[0].median
    floor = case.bytes / case.card.ceiling
    figure = AttentionFigure(
        name,
        case.bytes / 2**20,
        floor * 1e6,
        ours * 1e6,
        floor / ours,
        plan.median * 1e6,
        detail={"ours": asdict(timings[0])},
    )
    if others:
        by_peer = dict(zip(others, timings[1:], strict=True))
        best = min(by_peer, key=lambda key: by_peer[key].median)
        figure.peer_us = by_peer[best].median * 1e6
        figure.ratio = by_peer[best].median / ours
        theirs = others[best][1].float()
        figure.difference = float((case.out.float() - theirs).norm() / theirs.norm())
        figure.detail |= {"peer": best, **{key: asdict(value) for key, value in by_peer.items()}}
    return figure


def zipf_lengths(rows: int, total: int, shortest: int = 128, longest: int = 16384, seed: int = 7) -> list[int]:
    """Zipf-distributed between the two ends, scaled to an exact sum."""
    rng = random.Random(seed)
    raw = [min(longest, shortest * (1 / (1 - rng.random()))) for _ in range(rows)]
    for _ in range(50):
        scale = total / sum(raw)
        raw = [min(longest, max(shortest, value * scale)) for value in raw]
    lengths = [int(value) for value in raw]
    index = 0
    while (rest := total - sum(lengths)) > 0:
        step = min(rest, longest - lengths[index])
        lengths[index] += step
        index += 1
    return lengths


def attention(card: Card, peers: bool, report: Callable[[str], None]) -> dict[str, Any]:
    import torch

    figures = []
    for batch, context in ATTENTION_SHAPES:
        figure = measure_attention(f"{batch} x {context}", AttentionCase(card, [context] * batch), peers)
        figures.append(figure)
        report(_attention_line(figure))
        torch.cuda.empty_cache()
    result: dict[str, Any] = {"shapes": [asdict(figure) for figure in figures]}
    if ratios := [figure.ratio for figure in figures if figure.ratio]:
        result["geometric_mean"] = statistics.geometric_mean(ratios)
        result["slowest"] = min(ratios)
        report(f"geometric mean {result['geometric_mean']:.3f} x the peer's speed, slowest {result['slowest']:.3f}")
    result["zipf"] = _skew(card, report)
    result["block_sizes"] = _block_sizes(card, report)
    return result


def _skew(card: Card, report: Callable[[str], None]) -> dict[str, float]:
    """Zipf lengths against equal ones, with the same number of tokens."""
    found = {}
    for rows, mean in ((64, 1024), (64, 2048), (128, 2048)):
        uneven = AttentionCase(card, zipf_lengths(rows, rows * mean))
        even = AttentionCase(card, [mean] * rows)
        uneven.plan()
        even.plan()
        times = [timing.median * 1e6 for timing in timed([uneven.run, even.run], card)]
        found[f"{rows} x {mean}"] = times[0] / times[1]
        report(
            f"zipf / uniform, {rows} rows, {mean} on average: {times[0]:.1f} / {times[1]:.1f} us = "
            f"{times[0] / times[1]:.3f}"
        )
    return found


def _block_sizes(card: Card, report: Callable[[str], None]) -> dict[str, dict[int, float]]:
    """Microseconds by block size."""
    import torch

    found = {}
    for batch, context in ((8, 4096), (64, 1024), (128, 4096)):
        cases = {size: AttentionCase(card, [context] * batch, size) for size in (16, 32, 64, 128)}
        for case in cases.values():
            case.plan()
        timings = timed([case.run for case in cases.values()], card)
        times = {size: timing.median * 1e6 for size, timing in zip(cases, timings, strict=True)}
        found[f"{batch} x {context}"] = times
        report(
            f"block size 16 / 128, {batch} x {context}: {times[16]:.1f} / {times[128]:.1f} us = "
            f"{times[16] / times[128]:.3f}"
        )
        del cases, case
        torch.cuda.empty_cache()
    return found


def _attention_line(figure: AttentionFigure) -> str:
    line = f"{figure.name:>12} {figure.mib:7.1f} MiB  floor {figure.floor_us:6.1f}  ours {figure.ours_us:6.1f} us "
    line += f"{figure.share:4.0%}  plan {figure.plan_us:4.1f}"
    if figure.ratio is not None:
        line += f"  peer {figure.peer_us:6.1f}  {figure.ratio:.3f} x  differs {figure.difference:.1e}"
    return line


# ---- command line -------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Card, bool, Callable[[str], None]], dict[str, Any]]] = {"attention": attention}


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "pycuda", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="all unless named")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="a drawing of `attention`, .svg or .png; needs matplotlib")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="of compiled kernels")
    arguments = parser.parse_args(argv)
    card = Card(arguments.cache_dir)
    ceiling = card.measure_ceiling()
    print(f"{card.name}: reads {ceiling / 1e12:.2f} TB/s", flush=True)
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kernels", *(argv or sys.argv[1:])]),
        "card": card.name,
        "versions": versions(),
        "read_tb_per_s": ceiling / 1e12,
    }
    for part in arguments.parts or PARTS:
        result[part] = PARTS[part](card, not arguments.no_peer, lambda line: print(line, flush=True))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot and "attention" in result:
        plots.attention(result, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
