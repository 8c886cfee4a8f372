"""Kernels other than attention beside their floors and torch's own: products, whole layers, sampling, moves of blocks.

    python -m benchmarks.kernels_small --json small.json [--sweep]

Each figure is the median of several replays of a CUDA graph. Weights rotate over several times the L2, so that every
launch reads them from memory as a step does. `overlap` lets a kernel start while the one before it still runs. With
--sweep every product is timed under several cuts, which is how the table in engine/backend/launches.py was made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.launcher import compile_all, run
from engine.backend import launches
from engine.backend.launches import Heads
from engine.backend.products import Ending, GemvShape, gemv, m_tiles, skinny, skinny_shape, weight_box
from engine.backend.tensor_map import tensor_map

READ = 4.57e12  # bytes a second, of a kernel that only reads, on an H200
SPREAD = 400 << 20  # bytes over which weights rotate
EPS = 1e-5
LLAMA = Heads(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=2)
SMOL = Heads(heads=9, kv_heads=3, head_dim=64, block_size=16, layers=2)


class Product:
    def __init__(self, name: str, outputs: int, inputs: int, ending: Ending, norm: bool, heads: Heads | None = None):
        self.name, self.outputs, self.inputs, self.ending = name, outputs, inputs, ending
        self.norm, self.heads = norm, heads

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.ending is Ending.SILU else 1)

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.inputs * 2

    def launch(self, rows: int, shape: GemvShape | None = None) -> launches.Launch:
        return gemv(
            self.outputs, self.inputs, rows, "bfloat16", self.ending, norm=self.norm, heads=self.heads, shape=shape
        )


def layer_products(name: str, hidden: int, inner: int, heads: Heads) -> list[Product]:
    q, qkv = heads.heads * heads.head_dim, (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    return [
        Product(f"{name} qkv", qkv, hidden, Ending.ROPE, True, heads),
        Product(f"{name} o", hidden, q, Ending.RESIDUAL, False),
        Product(f"{name} gate_up", inner, hidden, Ending.SILU, True),
        Product(f"{name} down", hidden, inner, Ending.RESIDUAL, False),
    ]


MODELS = {"8B": layer_products("8B", 4096, 14336, LLAMA), "135M": layer_products("135M", 576, 1536, SMOL)}
HEADS_OF = {
    "8B": Product("8B lm_head", 128256, 4096, Ending.LOGITS, True),
    "135M": Product("135M lm_head", 49152, 576, Ending.LOGITS, True),
}


def graph_us(body: Callable[[], int], replays: int = 7) -> float:
    """Median microseconds of one of the launches whose number `body`, which is captured, returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count = body()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[2:])


class Buffers:
    """Everything that the products of one model touch, for one number of rows. The first sequence position is 100."""

    def __init__(self, products: Iterable[Product], rows: int) -> None:
        self.rows = rows
        widest = max(max(one.weight_rows, one.inputs) for one in products)
        self.flat = torch.randn(rows * widest, device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros(rows * widest, device="cuda", dtype=torch.float32)
        self.gain = torch.ones(widest, device="cuda", dtype=torch.bfloat16)
        self.positions = torch.full((rows,), 100, dtype=torch.int32, device="cuda")
        self.tables = torch.arange(rows * 8, dtype=torch.int32, device="cuda")
        self.rotation = torch.ones(200, 128, dtype=torch.complex64, device="cuda")
        self.pool = torch.zeros(rows * 8 * 2 * 2 * 8 * 16 * 128, device="cuda", dtype=torch.bfloat16)

    def x(self, width: int) -> Tensor:
        return self.flat[: self.rows * width].view(self.rows, width)

    def rope(self) -> bytes:
        pointers = (self.rotation, self.positions, self.tables)
        return launches.ROPE_ARGS.pack(*(one.data_ptr() for one in pointers), 0, self.pool.data_ptr(), 8, 1)


def launch_one(product: Product, weight: Tensor, x: Tensor, out: Tensor, buffers: Buffers, overlap: bool,
               shape: GemvShape | None = None) -> None:  # fmt: skip
    rope = (buffers.rope(),) if product.heads else ()
    gain = buffers.gain if product.norm else None
    launch = product.launch(buffers.rows, shape)
    run(launch, weight, x, gain, None, out, buffers.rows, EPS, *rope, overlap=overlap)


def ours(product: Product, weights: list[Tensor], x: Tensor, buffers: Buffers, overlap: bool,
         shape: GemvShape | None = None) -> int:  # fmt: skip
    for weight in weights:
        launch_one(product, weight, x, buffers.out, buffers, overlap, shape)
    return len(weights)


def hopper(product: Product, weights: list[Tensor], x: Tensor, buffers: Buffers) -> int:
    """By skinny.cu; its norm takes no gain."""
    rows, out = buffers.rows, product.outputs
    cut = skinny_shape(out, product.inputs, rows, product.ending, "bfloat16")
    assert cut is not None, f"{product.name} is not for skinny.cu at {rows} rows"
    norm = product.norm and product.ending is not Ending.LOGITS
    launch = skinny(out, product.inputs, rows, "bfloat16", product.ending, cut, norm=norm, heads=product.heads)
    rope = (buffers.rope(),) if product.heads else ()
    x_map, stages = tensor_map(x, cut.columns), product.inputs // cut.inputs
    for weight in weights:
        w_map = tensor_map(weight, weight_box(product.ending, cut))
        run(launch, w_map, x_map, None, buffers.out, rows, out, stages, EPS, *rope, overlap=True)
    return len(weights)


def repeat(calls: Sequence[Callable[[], object]]) -> int:
    for call in calls:
        call()
    return len(calls)


def weights_of(product: Product) -> list[Tensor]:
    copies = max(2, min(160, SPREAD // product.weight_bytes))
    scale = product.inputs**-0.5
    return [
        torch.randn(product.weight_rows, product.inputs, device="cuda", dtype=torch.bfloat16) * scale
        for _ in range(copies)
    ]


# ---- products -----------------------------------------------------------------------------------------------------


def cuts(product: Product, across: int) -> list[GemvShape]:
    """What --sweep tries: what fits, keeps warps and card evenly busy and has enough copies under way."""
    silu, small = product.ending is Ending.SILU, product.inputs < 2048
    found = []
    for out_tiles, warps, chunk, stages in itertools.product(
        (1, 2, 3, 4, 6, 7), (4, 6, 8, 9, 12, 16, 18, 24), (32, 64), (1, 2, 3, 4)
    ):
        tiles = out_tiles * (2 if silu else 1)
        chunks = product.inputs // chunk
        blocks = -(-product.outputs // (16 * out_tiles))
        cut = GemvShape(tiles, across, warps, stages, chunk)
        ahead = stages * (2 * tiles + across + product.norm) * chunk // 8
        registers = ahead + 4 * tiles * across + 48
        if registers > min(255, 65536 // (warps * 32)) or product.inputs % chunk or warps > chunks:
            continue
        if (chunks % warps and chunks // warps < 8) or stages > -(-chunks // warps):
            continue
        if small:
            if out_tiles <= 2 and warps > 4 and warps != 16:
                found.append(cut)
            continue
        resident = min(4, 65536 // (registers * warps * 32), max(1, blocks // 132))
        rounds = blocks / (132 * resident)
        under_way = resident * tiles * 16 * chunk * 2 * warps * stages
        if warps in (4, 8, 16) and rounds / math.ceil(rounds) > 0.9 and under_way >= 40 << 10 and blocks >= 120:
            found.append(cut)
    return found


def sweep(row_counts: Iterable[int], names: Iterable[str]) -> list[dict[str, Any]]:
    results = []
    for product in [*MODELS["8B"], *MODELS["135M"], *HEADS_OF.values()]:
        if product.name not in names:
            continue
        weights = weights_of(product)
        for rows in row_counts:
            timed = []
            buffers = Buffers([product], rows)
            x = buffers.x(product.inputs)
            for cut in cuts(product, m_tiles(rows)):
                both = [partial(ours, product, weights, x, buffers, overlap, cut) for overlap in (True, False)]
                timed.append((graph_us(both[0], 3), graph_us(both[1], 3), cut))
            timed.sort(key=lambda one: one[0])
            floor = product.weight_bytes / READ * 1e6
            for overlapped, plain, cut in timed:
                results.append(
                    {"product": product.name, "rows": rows, "overlap_us": overlapped, "us": plain, "floor_us": floor,
                     "cut": [cut.tiles, cut.m_tiles, cut.warps, cut.stages, cut.chunk]}
                )  # fmt: skip
            best = ", ".join(f"{c.tiles}/{c.warps}/{c.stages}/{c.chunk} {o:.1f}" for o, _, c in timed[:5])
            print(
                f"  {product.name:12s} rows {rows:3d} floor {floor:6.1f} us: {best} .. {timed[-1][0]:.1f}", flush=True
            )
    return results


def products(row_counts: Iterable[int], models: Iterable[str]) -> list[dict[str, Any]]:
    """Ours, with norm and ending included, beside the bare product of cuBLAS."""
    results = []
    for product in [one for model in models for one in (*MODELS[model], HEADS_OF[model])]:
        weights = weights_of(product)
        for rows in row_counts:
            buffers = Buffers([product], rows)
            x = buffers.x(product.inputs)
            floor = product.weight_bytes / READ * 1e6
            one: dict[str, Any] = {
                "product": product.name, "rows": rows, "floor_us": floor,
                "us": graph_us(partial(ours, product, weights, x, buffers, False)),
                "overlap_us": graph_us(partial(ours, product, weights, x, buffers, True)),
                "cublas_us": graph_us(partial(repeat, [partial(F.linear, x, weight) for weight in weights])),
            }  # fmt: skip
            if skinny_shape(product.outputs, product.inputs, rows, product.ending, "bfloat16"):
                one["skinny_us"] = graph_us(partial(hopper, product, weights, x, buffers))
            results.append(one)
            print(
                f"  {product.name:12s} rows {rows:3d}: floor {floor:6.1f}  gemv {one['us']:6.1f}, overlapped "
                f"{one['overlap_us']:6.1f} ({floor / one['overlap_us']:.0%})  skinny {one.get('skinny_us', 0):6.1f}  "
                f"cuBLAS {one['cublas_us']:6.1f} us",
                flush=True,
            )
    return results


# ---- a layer without its attention --------------------------------------------------------------------------------


def layers(row_counts: Iterable[int], models: Iterable[str]) -> list[dict[str, Any]]:
    results = []
    for model in models:
        parts = MODELS[model]
        count = 8 if model == "8B" else 60
        weights = [weights_of_layer(parts) for _ in range(count)]
        floor = sum(one.weight_bytes for one in parts) / READ * 1e6
        for rows in row_counts:
            buffers = Buffers(parts, rows)
            one: dict[str, Any] = {"model": model, "rows": rows, "floor_us": floor}
            for name, overlap in (("us", False), ("overlap_us", True)):
                one[name] = graph_us(partial(own_layers, parts, weights, buffers, overlap))
            one["cublas_us"] = graph_us(partial(cublas_layers, parts, weights, buffers))
            results.append(one)
            print(
                f"  {model:5s} rows {rows:3d}: floor {floor:6.1f}  ours {one['us']:6.1f}, overlapped "
                f"{one['overlap_us']:6.1f} ({floor / one['overlap_us']:.0%})  "
                f"cuBLAS and small kernels {one['cublas_us']:6.1f} us",
                flush=True,
            )
    return results


def weights_of_layer(parts: list[Product]) -> list[Tensor]:
    return [
        torch.randn(one.weight_rows, one.inputs, device="cuda", dtype=torch.bfloat16) * one.inputs**-0.5
        for one in parts
    ]


def own_layers(parts: list[Product], weights: list[list[Tensor]], buffers: Buffers, overlap: bool) -> int:
    x, h = buffers.x(parts[0].inputs), buffers.out.view(torch.bfloat16)
    for layer in weights:
        for part, weight in zip(parts, layer, strict=True):
            residual = part.ending is Ending.RESIDUAL
            launch_one(part, weight, h if residual else x, x if residual else h, buffers, overlap)
    return len(weights)


def cublas_layers(parts: list[Product], weights: list[list[Tensor]], buffers: Buffers) -> int:
    """The same with cuBLAS through torch and our own small kernels between the products."""
    rows, (qkv, out, gate_up, _) = buffers.rows, parts
    assert qkv.heads is not None
    x, h = buffers.x(qkv.inputs), torch.empty(rows, qkv.inputs, device="cuda", dtype=torch.bfloat16)
    inner = torch.empty(rows, gate_up.outputs, device="cuda", dtype=torch.bfloat16)
    norm = launches.rms_norm(qkv.inputs, rows, "bfloat16")
    silu = launches.silu_mul(gate_up.outputs, rows, "bfloat16")
    rope = launches.rope_write(qkv.heads, rows, "bfloat16")
    for wide, o, up, down in weights:
        run(norm, x, None, buffers.gain, h, EPS)
        heads = F.linear(h, wide)
        run(rope, heads, rows, buffers.rope())
        x.addmm_(heads[:, : out.inputs], o.t())
        run(norm, x, None, buffers.gain, h, EPS)
        run(silu, F.linear(h, up), inner, rows)
        x.addmm_(inner, down.t())
    return len(weights)


# ---- sampling and blocks ------------------------------------------------------------------------------------------

KINDS = {
    "greedy": (0.0, 1.0, 0.0, 0),
    "temperature": (1.0, 1.0, 0.0, 0),
    "top_p": (1.0, 0.9, 0.0, 0),
    "top_k, top_p, min_p": (0.8, 0.95, 0.05, 50),
}


def sampling(row_counts: Iterable[int]) -> list[dict[str, Any]]:
    results = []
    for vocab, dtype in ((49152, "float32"), (128256, "float32"), (128256, "bfloat16")):
        for rows in row_counts:
            logits = torch.randn(rows, vocab, device="cuda") * 2
            logits = logits.to(torch.bfloat16) if dtype == "bfloat16" else logits
            zeros = torch.zeros(rows, dtype=torch.int32, device="cuda")
            tokens = torch.zeros(rows, dtype=torch.int32, device="cuda")
            launch = launches.sample(vocab, rows, dtype)
            one: dict[str, Any] = {"vocab": vocab, "dtype": dtype, "rows": rows}
            for name, (temperature, top_p, min_p, top_k) in KINDS.items():
                packed = b"".join(
                    launches.SAMPLE_ROW.pack(temperature, top_p, min_p, top_k, 1, 0, 0, 0, row, 0, 0, 0)
                    for row in range(rows)
                )
                params = torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda()
                arguments = (logits, params, zeros, zeros, None, None, None, 0, None, 0, None, tokens)

                one[name] = graph_us(partial(repeat, [partial(run, launch, *arguments)] * 5))
            one["torch argmax"] = graph_us(partial(repeat, [partial(logits.argmax, -1)] * 3))
            one["torch softmax"] = graph_us(partial(repeat, [partial(F.softmax, logits, -1, dtype=torch.float32)] * 3))
            results.append(one)
            figures = "  ".join(f"{name} {value:.1f}" for name, value in one.items() if isinstance(value, float))
            print(f"  {rows:3d} x {vocab} {dtype}: {figures} us", flush=True)
    return results


def small(rows: int = 128) -> list[dict[str, Any]]:
    """Kernels that only move memory, beside torch's, at a batch of 128 of the Llama-3-8B shape."""
    x, delta, out = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gain = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    both, inner = (
        torch.randn(rows, 28672, device="cuda", dtype=torch.bfloat16),
        torch.empty_like(x).new_empty(rows, 14336),
    )
    norm, silu = launches.rms_norm(4096, rows, "bfloat16"), launches.silu_mul(14336, rows, "bfloat16")
    block = 2 << 20
    pool = torch.zeros(1200, block, dtype=torch.uint8, device="cuda")
    ids = torch.randperm(512, device="cuda").to(torch.int32)
    copy = launches.copy_blocks(block, 256)

    def times(count: int, body: Callable[[], Any]) -> float:
        return graph_us(partial(repeat, [body] * count))

    one = {
        "rms_norm": times(50, lambda: run(norm, x, delta, gain, out, EPS)),
        "rms_norm overlapped": times(50, lambda: run(norm, x, delta, gain, out, EPS, overlap=True)),
        "torch rms_norm": times(50, lambda: F.rms_norm(x, (4096,), gain, EPS)),
        "silu_mul": times(50, lambda: run(silu, both, inner, rows)),
        "torch silu, mul": times(50, lambda: F.silu(both[:, :14336]) * both[:, 14336:]),
        "copy 256 blocks of 2 MiB": times(3, lambda: run(copy, pool[600:], pool, ids[:256], ids[256:])),
    }
    one["copy, TB/s read and written"] = 2 * 256 * block / one["copy 256 blocks of 2 MiB"] / 1e6
    print("  " + "  ".join(f"{name} {value:.2f}" for name, value in one.items()), flush=True)
    return [one]


SECTIONS = ["products", "layers", "sampling", "small"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS), help="shapes to time")
    parser.add_argument("--sweep", nargs="*", metavar="PRODUCT", help="time every cut; of these products, or of all")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to measure")
    arguments = parser.parse_args(argv)
    every = [*MODELS["8B"], *MODELS["135M"], *HEADS_OF.values()]
    wanted: list[launches.Launch] = []
    if arguments.sweep is not None:
        names = arguments.sweep or [one.name for one in every]
        tiles = {m_tiles(rows): rows for rows in arguments.rows}
        wanted += [
            one.launch(rows, cut)
            for one in every
            if one.name in names
            for m, rows in tiles.items()
            for cut in cuts(one, m)
        ]
    else:
        wanted = [one.launch(rows) for one in every for rows in arguments.rows]
    print(f"compiling {len({one.kernel for one in wanted})} kernels", flush=True)
    compile_all(wanted)
    found: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kernels_small", *(sys.argv[1:] if argv is None else argv)]),
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }  # fmt: skip
    if arguments.sweep is not None:
        print("cuts: tiles/warps/stages/chunk, us overlapped")
        found["sweep"] = sweep(arguments.rows, names)
    else:
        sections: dict[str, Callable[[], Any]] = {
            "products": lambda: products(arguments.rows, arguments.models),
            "layers": lambda: layers(arguments.rows, arguments.models),
            "sampling": lambda: sampling((1, 32, 128)),
            "small": small,
        }
        for name in arguments.only:
            print(name)
            found[name] = sections[name]()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
