"""Paged decode attention on the card against float64: every shape, ugly lengths, poisoned memory, graph replays.

Inputs are new in every run; the seed is printed when a test fails. Whatever a kernel may not read holds NaN: unused
blocks, the tail of a last block, outputs, partial sums. Never compares speeds.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backend.attention import AttentionShape, Geometry, PagedAttention, geometries
from engine.backend.nvcc import DEFAULT_CACHE_DIR

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMITS = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}  # |out - ref| / |ref|, by row
CACHE_DIR = Path(os.environ.get("PAGEWIRE_TEST_KERNELS", DEFAULT_CACHE_DIR))
UGLY = [0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 0, 0, 127, 128, 129, 1000, 4097, 16384, 1, 0]

SHAPES = [
    AttentionShape("bfloat16", 128, 4, 16),
    AttentionShape("bfloat16", 128, 8, 64),
    AttentionShape("bfloat16", 128, 1, 128),
    AttentionShape("bfloat16", 64, 3, 16),
    AttentionShape("bfloat16", 256, 8, 16),
    AttentionShape("bfloat16", 256, 12, 32),
    AttentionShape("float16", 96, 1, 32),
    AttentionShape("float16", 96, 5, 16),
    AttentionShape("float16", 128, 16, 16),
    AttentionShape("float16", 64, 71, 16),
    AttentionShape("bfloat16", 128, 4, 16, window=1000),
    AttentionShape("bfloat16", 256, 2, 16, window=64, softcap=50.0),
    AttentionShape("float32", 64, 3, 16),
    AttentionShape("float32", 64, 19, 16),
    AttentionShape("float32", 128, 4, 32, window=100, softcap=30.0),
]


NARROW = AttentionShape("bfloat16", 64, 3, 16)  # which has kernels by the number of rows
KERNELS = [
    (shape, one) for shape in (NARROW, AttentionShape("bfloat16", 64, 8, 16)) for _, one in geometries(shape, 228 << 10)
]


@dataclass
class World:
    """One layer of a cache in which only what the lengths cover is not NaN."""

    q: Tensor
    cache: Tensor  # [blocks, layers, 2, kv_heads, block_size, head_dim]
    tables: Tensor
    lengths: Tensor


LAYERS, LAYER = 3, 1


@pytest.fixture(scope="module")
def stream() -> Iterator[Any]:
    """A PyCUDA stream in torch's context, which torch uses too."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    import pycuda.driver as cuda

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    cuda.init()
    context = cuda.Device(torch.cuda.current_device()).retain_primary_context()
    context.push()
    ours = cuda.Stream()
    with torch.cuda.stream(torch.cuda.ExternalStream(ours.handle)):
        yield ours
    context.pop()


@pytest.fixture
def seed() -> int:
    value = random.SystemRandom().randrange(1 << 32)
    print(f"seed {value}")
    torch.manual_seed(value)
    random.seed(value)
    return value


def build(shape: AttentionShape, kv_heads: int, lengths: list[int], spare: int = 7) -> World:
    dtype = DTYPES[shape.dtype]
    counts = [-(-n // shape.block_size) for n in lengths]
    width = max([*counts, 1])
    blocks = sum(counts) + spare
    cache = torch.full(
        (blocks, LAYERS, 2, kv_heads, shape.block_size, shape.head_dim), float("nan"), dtype=dtype, device="cuda"
    )
    ids = random.sample(range(blocks), sum(counts))
    tables = torch.full((len(lengths), width), -(1 << 30), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
        if count:
            values = torch.randn(count * shape.block_size, 2, kv_heads, shape.head_dim, device="cuda").to(dtype)
            values[length:] = float("nan")
            values = values.view(count, shape.block_size, 2, kv_heads, shape.head_dim).permute(0, 2, 3, 1, 4)
            cache[torch.tensor(mine, device="cuda"), LAYER] = values
    q = 2 * torch.randn(len(lengths), kv_heads * (shape.group + 2), shape.head_dim, device="cuda")
    return World(q.to(dtype), cache, tables.cuda(), torch.tensor(lengths, dtype=torch.int32).cuda())


def reference(shape: AttentionShape, world: World, kv_heads: int, scale: float) -> Tensor:
    rows = len(world.lengths)
    out = torch.zeros(rows, kv_heads, shape.group, shape.head_dim, dtype=torch.float64, device="cuda")
    q = world.q[:, : kv_heads * shape.group].double().view(rows, kv_heads, shape.group, shape.head_dim)
    for row, length in enumerate(world.lengths.tolist()):
        if length == 0:
            continue
        ids = world.tables[row, : -(-length // shape.block_size)].long()
        kv = world.cache[ids, LAYER].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].double()
        if shape.window:
            kv = kv[:, :, -shape.window :]
        logits = torch.einsum("hgd,hnd->hgn", q[row], kv[0]) * scale
        if shape.softcap:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        out[row] = torch.einsum("hgn,hnd->hgd", logits.softmax(-1), kv[1])
    return out.flatten(1, 2)


class Launcher:
    """Plans and runs on poisoned outputs and buffers."""

    def __init__(
        self, shape: AttentionShape, kv_heads: int, max_rows: int, stream: Any, chosen: Geometry | None = None
    ) -> None:
        import pycuda.driver as cuda

        self.attention = PagedAttention(shape, kv_heads, max_rows, chosen, CACHE_DIR)
        self.stream = stream
        cuda.memset_d32(self.attention.plan_memory, 0x7F7F7F7F, self.attention.plan_words)
        cuda.memset_d32(self.attention.partials, 0x7FC00000, self.attention.partial_words)

    def plan(self, world: World) -> None:
        rows, width = world.tables.shape
        self.attention.plan(self.stream, world.lengths.data_ptr(), world.tables.data_ptr(), rows, width)

    def run(self, world: World, out: Tensor, scale: float) -> None:
        rows, width = world.tables.shape
        cache = world.cache
        self.attention.run(
            self.stream,
            world.q.data_ptr(),
            world.q.stride(0),
            cache[0, LAYER].data_ptr(),
            cache.stride(0),
            out.data_ptr(),
            world.tables.data_ptr(),
            rows,
            width,
            scale,
        )

    def output(self, world: World) -> Tensor:
        shape, rows = self.attention.shape, world.tables.shape[0]
        heads = self.attention.kv_heads * shape.group
        return torch.full((rows, heads, shape.head_dim), float("nan"), dtype=world.q.dtype, device="cuda")


def check(shape: AttentionShape, world: World, out: Tensor, kv_heads: int, scale: float) -> None:
    expected = reference(shape, world, kv_heads, scale)
    assert not out.isnan().any(), f"rows {out.isnan().flatten(1).any(1).nonzero().flatten().tolist()} hold NaN"
    error = (out.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp_min(1e-9)
    worst = int(error.argmax())
    assert error[worst] <= LIMITS[shape.dtype], f"row {worst} of length {int(world.lengths[worst])}: {error[worst]:.2e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ugly_lengths_agree_with_float64(shape: AttentionShape, stream: Any, seed: int) -> None:
    kv_heads = 1 if shape.group > 16 else 3
    lengths = random.sample(UGLY, len(UGLY))
    launcher = Launcher(shape, kv_heads, len(lengths) + 5, stream)
    scale = shape.head_dim**-0.5
    world = build(shape, kv_heads, lengths)
    out = launcher.output(world)
    launcher.plan(world)
    launcher.run(world, out, scale)
    check(shape, world, out, kv_heads, scale)
    again = launcher.output(world)
    launcher.run(world, again, scale)  # the next layer: the same plan, counters as the first left them
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    "lengths",
    [[1], [64], [16384], [0], [0] * 40, [1] * 300, [1024] * 33, [512] * 88, [16384, 1, 0, 1, 16384], [70] * 1500],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}",
)
def test_any_split_over_the_card_gives_the_same(lengths: list[int], stream: Any, seed: int) -> None:
    shape = SHAPES[0]
    launcher = Launcher(shape, 2, len(lengths), stream)
    world = build(shape, 2, lengths)
    out = launcher.output(world)
    launcher.plan(world)
    launcher.run(world, out, 0.1)
    check(shape, world, out, 2, 0.1)


def test_rows_of_about_one_length_are_not_split(stream: Any, seed: int) -> None:
    """As many heads as blocks: each block has one, the longest ones a little more than their share."""
    shape, kv_heads = SHAPES[0], 2
    rows = PagedAttention(shape, kv_heads, 1, cache_dir=CACHE_DIR).grid // kv_heads
    lengths = [1024 - n % 24 for n in range(rows)] + [0, 0]
    launcher = Launcher(shape, kv_heads, len(lengths), stream)
    world = build(shape, kv_heads, random.sample(lengths, len(lengths)))
    out = launcher.output(world)
    launcher.plan(world)
    launcher.run(world, out, 0.1)
    check(shape, world, out, kv_heads, 0.1)
    assert not merges(launcher)


def merges(launcher: Launcher) -> bool:
    """Whether anything of the last run was left to be merged: its buffer was poisoned before the first one."""
    import pycuda.driver as cuda

    header = np.empty(4, dtype=np.int32)
    cuda.memcpy_dtoh(header, launcher.attention.plan_memory)
    partials = np.empty(launcher.attention.partial_words, dtype=np.float32)
    cuda.memcpy_dtoh(partials, launcher.attention.partials)
    split = bool(header[1] > 0)
    assert split or np.isnan(partials).all(), "no row is split, but partial sums were left"
    return split


@pytest.mark.parametrize(("rows", "length", "split"), [(8, 1024, False), (8, 8000, True), (44, 1024, False)])
def test_a_small_batch_is_split_only_where_that_is_worth_a_merge(
    rows: int, length: int, split: bool, stream: Any, seed: int
) -> None:
    import pycuda.driver as cuda

    attribute = cuda.device_attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    found = geometries(NARROW, cuda.Context.get_device().get_attribute(attribute))
    if len(found) == 1:
        pytest.skip("this card's shared memory has no room for the rings of larger batches")
    launcher = Launcher(NARROW, 3, rows, stream, next(one for least, one in reversed(found) if rows >= least))
    world = build(NARROW, 3, [length - n % 5 for n in range(rows)])
    out = launcher.output(world)
    launcher.plan(world)
    launcher.run(world, out, 0.1)
    check(NARROW, world, out, 3, 0.1)
    assert merges(launcher) == split


@pytest.mark.parametrize(("shape", "chosen"), KERNELS, ids=str)
@pytest.mark.parametrize("lengths", [UGLY, [1024 - n % 24 for n in range(128)], [300] * 9, [5] * 200], ids=len)
def test_the_kernels_of_small_and_of_large_batches_agree_with_float64(
    lengths: list[int], shape: AttentionShape, chosen: Geometry, stream: Any, seed: int
) -> None:
    """Also where a warp has less to read than its ring holds."""
    import pycuda.driver as cuda

    device = cuda.Context.get_device()
    most = device.get_attribute(cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    if chosen.shared_bytes > most - 1024:
        pytest.skip(f"a block of this card has {most} bytes of shared memory")
    launcher = Launcher(shape, 3, len(lengths), stream, chosen)
    world = build(shape, 3, random.sample(lengths, len(lengths)))
    launcher.plan(world)
    for _ in range(2):
        out = launcher.output(world)
        launcher.run(world, out, 0.1)
        check(shape, world, out, 3, 0.1)


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        (random.Random(5).sample(range(1, 2101), 64), None),
        ([1024 - n % 5 for n in range(44)], 132),
        ([500] * 48, 72),
        ([1024] * 128, 128),
    ],
    ids=["mixed", "one item each", "two each", "three each"],
)
def test_mixed_lengths_are_dealt_evenly_and_equal_ones_to_no_more_blocks_than_they_need(
    lengths: list[int], blocks: int | None, stream: Any, seed: int
) -> None:
    import pycuda.driver as cuda

    shape, kv_heads = NARROW, 3
    _, chosen = geometries(shape, 228 << 10)[-1]
    launcher = Launcher(shape, kv_heads, len(lengths), stream, chosen)
    if launcher.attention.grid != 132:
        pytest.skip("the numbers of blocks are those of 132 multiprocessors")
    launcher.plan(build(shape, kv_heads, lengths))
    torch.cuda.synchronize()
    plan = np.empty(launcher.attention.plan_words, dtype=np.int32)
    cuda.memcpy_dtoh(plan, launcher.attention.plan_memory)
    counts = plan[32 : 32 + 132 * 64].reshape(132, 64)[:, 2]
    units = kv_heads * sum(-(-n // 16) for n in lengths)
    assert plan[1] == 0, "no row is split"
    assert counts.sum() == units
    assert counts.max() <= -(-units // 132) + chosen.merge
    if blocks is not None:
        assert np.count_nonzero(counts) == blocks


def test_a_graph_serves_every_length_and_table(stream: Any, seed: int) -> None:
    shape, kv_heads, rows, width = SHAPES[0], 4, 17, 300
    launcher = Launcher(shape, kv_heads, rows, stream)
    held = build(shape, kv_heads, [width * shape.block_size] * rows)
    out = launcher.output(held)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        launcher.plan(held)
        launcher.run(held, out, 0.1)
        launcher.run(held, out, 0.1)
    for _ in range(12):
        longest = random.choice([1, 20, 300, width * shape.block_size])
        lengths = [random.choice([0, 1, longest, random.randint(1, longest)]) for _ in range(rows)]
        world = build(shape, kv_heads, lengths, held.cache.shape[0] - sum(-(-n // shape.block_size) for n in lengths))
        held.q.copy_(world.q)
        held.cache.copy_(world.cache)
        held.lengths.copy_(world.lengths)
        held.tables.fill_(-(1 << 30))
        held.tables[:, : world.tables.shape[1]] = world.tables
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(shape, held, out, kv_heads, 0.1)


def test_logits_that_grow_along_the_row_stay_exact(stream: Any, seed: int) -> None:
    """Every tile raises the maximum, some by less than the slack that a warp allows itself."""
    shape = SHAPES[0]
    launcher = Launcher(shape, 1, 1, stream)
    world = build(shape, 1, [3000])
    ids = world.tables[0].long()
    keys = world.cache[ids, LAYER, 0, 0].flatten(0, 1)
    keys *= torch.linspace(0.01, 3, len(keys), device="cuda").to(keys.dtype)[:, None]
    world.cache[ids, LAYER, 0, 0] = keys.view(len(ids), shape.block_size, shape.head_dim)
    out = launcher.output(world)
    launcher.plan(world)
    launcher.run(world, out, 0.3)
    check(shape, world, out, 1, 0.3)
