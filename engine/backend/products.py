"""Which kernel computes a product of few rows with a weight, and how it cuts it: gemv.cu, skinny.cu, or none of ours.

What is before a product (a norm) and after it (residual, silu, rotation and KV write) belongs to it. The cuts and the
numbers of rows up to which each kernel is the fastest were measured on an H200; benchmarks.kernels_small measures them.
Plain values, like those of engine.backend.launches: launches nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.backend.launches import Heads, Launch, over
from engine.backend.nvcc import kernel
from engine.config import DTYPES, ModelConfig

_MORE_THAN_HALF = 114 << 10  # bytes of a multiprocessor's shared memory
WHOLE = 200 << 10  # bytes of a multiprocessor's shared memory, where a product has it to itself


class Ending(enum.IntEnum):
    """What a product does with its sums; EPILOGUE of gemv.cu."""

    STORE = 0
    RESIDUAL = 1  # adds to what is there
    SILU = 2  # silu of the first half of the outputs times the second half
    ROPE = 3  # rotates Q and K, writes K and V to blocks
    LOGITS = 4  # float32, whatever the element type


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How gemv.cu cuts a product: 16-row tiles of the weight and 8-row tiles of x per block, warps, chunks of K that a
    warp has under way, and their length."""

    tiles: int
    m_tiles: int
    warps: int
    stages: int
    chunk: int = 64


def gemv(
    outputs: int,
    inputs: int,
    rows: int,
    dtype: str,
    ending: Ending,
    *,
    norm: bool = False,
    heads: Heads | None = None,
    shape: GemvShape | None = None,
) -> Launch:
    """x [rows, inputs] times a weight [outputs, inputs]; with SILU the weight has 2 * outputs rows.

    Arguments: w, x, norm, bias (each of these two 0 if there is none), out, rows (int), eps (float) and, with ROPE,
    ROPE_ARGS.
    """
    assert gemv_fits(outputs, inputs), f"no kernel for a product with {outputs} outputs and {inputs} inputs"
    assert (ending is Ending.ROPE) == (heads is not None), "heads are for ROPE, which needs them"
    cut = GemvShape(1 + (ending is Ending.SILU), m_tiles(rows), 8, 2)
    if dtype != "float32":  # whose kernel cuts nothing
        cut = shape or gemv_shape(outputs, inputs, rows, ending)
    settings = {
        "N": outputs,
        "K": inputs,
        "TILES": cut.tiles,
        "M_TILES": cut.m_tiles,
        "WARPS": cut.warps,
        "STAGES": cut.stages,
        "CHUNK": cut.chunk,
        "NORM": int(norm),
        "EPILOGUE": int(ending),
        "DTYPE": DTYPES.index(dtype),
    }
    if heads is not None:
        settings |= heads.settings
    if dtype == "float32":  # a warp has two outputs
        across, shared = over(outputs, 2 * cut.warps), 0
    else:
        across = over(outputs, 16 * (cut.tiles // 2 if ending is Ending.SILU else cut.tiles))
        shared = gemv_shared(cut, norm)
    return Launch(kernel("gemv", **settings), "gemv", (across, over(rows, 8 * cut.m_tiles)), cut.warps * 32, shared)


def gemv_fits(outputs: int, inputs: int) -> bool:
    """Whether gemv.cu can compute such a product; if not, cuBLAS does."""
    return inputs % 64 == 0 and outputs % 16 == 0


def gemv_pays(outputs: int, inputs: int, rows: int, ending: Ending) -> bool:
    """Whether gemv.cu is faster than cuBLAS and the small kernels around it; measured on an H200."""
    if not gemv_fits(outputs, inputs):
        return False
    if inputs < 2048:
        most = {Ending.LOGITS: 8, Ending.SILU: 64, Ending.ROPE: 128, Ending.RESIDUAL: 128 if inputs < 1024 else 64}
    else:
        most = {Ending.LOGITS: 8, Ending.SILU: 8, Ending.ROPE: 32, Ending.RESIDUAL: 32 if inputs <= outputs else 16}
    return rows <= most.get(ending, 16)


def gemv_shared(cut: GemvShape, norm: bool) -> int:
    """Bytes: where the sums of the warps meet."""
    return 4 * cut.warps * cut.m_tiles * 8 * (cut.tiles * 16 + 2 + norm)


def m_tiles(rows: int) -> int:
    """8-row tiles of x per block; more rows are more blocks, which read the weight again, mostly from the L2."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def gemv_shape(outputs: int, inputs: int, rows: int, ending: Ending) -> GemvShape:
    """The cut for a product, from `python -m benchmarks.kernels_small --sweep` on an H200."""
    pair = 2 if ending is Ending.SILU else 1
    across = m_tiles(rows)
    tiles = outputs // 16
    if inputs < 2048:  # the time that it takes to begin and to end is everything
        chunks = inputs // 64
        warps = next((count for count in range(9, 3, -1) if chunks % count == 0), min(8, chunks))
        per_block = 2 if pair == 2 and across == 1 and tiles > 1 else 1
        return GemvShape(per_block * pair, across, warps, min(3, over(chunks, warps)))
    if pair == 2:
        return GemvShape(2, across, 8, 3, chunk=32) if across == 4 else GemvShape(2, across, 8, 4 if across == 1 else 2)
    per_block = over(tiles, 132)
    if per_block == 3:
        return GemvShape(3, across, 8, 3 if across != 2 else 2, chunk=32 if across == 4 else 64)
    if across == 4 and ending is not Ending.RESIDUAL:  # a norm before it takes registers, too
        return GemvShape(min(2, tiles), across, 8, 3, chunk=32)
    return GemvShape(min(2, tiles), across, 8, 3 if across == 1 else 2)


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """How skinny.cu cuts a product: rows of x and 64-row tiles of the weight per block, warpgroups that share the
    tiles, stages of K that are under way, blocks that share K, the 64s of K in a stage, and whether a block takes so
    much shared memory that there is no second one on its multiprocessor."""

    columns: int
    tiles: int
    groups: int
    stages: int
    split: int = 1
    depth: int = 1
    apart: bool = False

    @property
    def inputs(self) -> int:
        """Of one stage of all blocks that share K."""
        return 64 * self.depth * self.split

    @property
    def shared(self) -> int:
        """Bytes: the ring of stages, which the sums replace at the end, at a multiple of 1024."""
        ring = self.stages * self.depth * (self.tiles * 64 + self.columns) * 128
        return 1024 + max(ring, 4 * self.columns * (self.tiles * 64 + 4), _MORE_THAN_HALF if self.apart else 0)


def skinny(
    outputs: int,
    inputs: int,
    rows: int,
    dtype: str,
    ending: Ending,
    shape: SkinnyShape,
    *,
    norm: bool = False,
    heads: Heads | None = None,
) -> Launch:
    """Like gemv, for a card of 9.0 and more rows; with `norm` its gain is in the weight already.

    Arguments: tensor maps of w (boxes of weight_box(ending, shape) rows) and x (of shape.columns), bias or 0, out, rows
    (int), outputs (int), stages of a block (int), eps (float) and, with ROPE, ROPE_ARGS.
    """
    assert (ending is Ending.ROPE) == (heads is not None), "heads are for ROPE, which needs them"
    assert inputs % shape.inputs == 0 and outputs % 4 == 0, f"{inputs} inputs do not split"
    assert shape.stages > 1 or inputs == shape.inputs, "a stage is given back while the next one is worked on"
    settings = {
        "COLS": shape.columns,
        "TILES": shape.tiles,
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
        "DEPTH": shape.depth,
        "SPLIT": shape.split,
        "NORM": int(norm),
        "EPILOGUE": int(ending),
        "DTYPE": DTYPES.index(dtype),
    }
    if heads is not None:
        settings |= heads.settings
    across = over(outputs, shape.tiles * (32 if ending is Ending.SILU else 64))
    grid = (shape.split * over(rows, shape.columns), across)
    return Launch(kernel("skinny", **settings), "skinny", grid, 128 * shape.groups + 32, shape.shared)


def weight_box(ending: Ending, shape: SkinnyShape) -> int:
    """Rows of the weight that one copy brings."""
    return 32 if ending is Ending.SILU and shape.tiles == 1 else 64


def skinny_shape(
    outputs: int, inputs: int, rows: int, ending: Ending, dtype: str, room: int = WHOLE
) -> SkinnyShape | None:
    """The cut for a product on a card of 9.0, or None where gemv.cu or cuBLAS is faster; measured on an H200. One with
    few inputs takes at most `room` bytes for what is under way."""
    if dtype == "float32" or inputs % 64 != 0 or outputs % 64 != 0:
        return None
    if inputs < 2048:
        return _narrow_shape(inputs, rows, ending, room)
    if ending is Ending.LOGITS:
        return SkinnyShape(32, 2, 2, 5) if 8 < rows <= 32 else None
    if rows <= (16 if ending is Ending.ROPE else 8) or rows > 128 or inputs % 256 != 0:
        return None
    columns = max(16, 1 << (rows - 1).bit_length())
    if ending is Ending.RESIDUAL:
        stages, depth = {16: (8, 2), 32: (8, 2), 64: (6, 2), 128: (8, 1)}[columns]
        return SkinnyShape(columns, 1, 1, stages, 2, depth)
    if ending is Ending.SILU:
        return {16: SkinnyShape(16, 2, 2, 6), 32: SkinnyShape(32, 2, 2, 5, depth=2), 64: SkinnyShape(64, 2, 2, 4),
                128: SkinnyShape(128, 4, 2, 4)}[columns]  # fmt: skip
    if columns == 128:
        return SkinnyShape(64, 3, 3, 6, 2)
    return SkinnyShape(columns, 2, 2, 8, 2) if columns == 64 else SkinnyShape(columns, 2, 2, 5, 2, 2)


def _narrow_shape(inputs: int, rows: int, ending: Ending, room: int) -> SkinnyShape | None:
    """For few inputs: all of K under way at once, because the time that it takes to begin and to end is everything."""
    least = {Ending.LOGITS: 8, Ending.RESIDUAL: 32 if inputs < 1024 else 16, Ending.SILU: 16, Ending.ROPE: 32}
    if rows <= least[ending] or rows > (32 if ending is Ending.LOGITS else 256):
        return None
    if ending is Ending.LOGITS:
        return SkinnyShape(32, 2, 2, 2)
    split = 2 if ending is Ending.RESIDUAL and inputs % 384 == 0 and inputs >= 1024 else 1
    chunks = inputs // 64 // split
    columns, tiles = 32, 1
    if ending is Ending.SILU and room == WHOLE:
        columns, tiles = (16, 1) if rows <= 32 else (32, 2) if rows <= 128 else (64, 2)
    elif ending is Ending.ROPE:
        columns = 16 if rows <= 128 else 32
    elif split == 2 and rows > 128:
        columns = 64
    apart = ending is Ending.RESIDUAL and split == 1 and room == WHOLE and 64 < rows <= 128
    if apart:  # behind attention, which leaves no room beside it: then more blocks on more multiprocessors are faster
        columns = 16
    part = 128 * (64 * tiles + columns)  # bytes of 64 inputs
    deepest = 1 if tiles == 2 and columns == 64 else 3
    depth = next(
        depth for depth in range(deepest, 0, -1)
        if chunks % depth == 0 and (depth == 1 or room // (depth * part) >= min(2, chunks // depth))
    )  # fmt: skip
    return SkinnyShape(columns, tiles, tiles, min(chunks // depth, room // (depth * part)), split, depth, apart)


@dataclass(frozen=True, slots=True)
class Product:
    """How a product is launched: by skinny.cu with its shape, or by gemv.cu."""

    launch: Launch
    shape: SkinnyShape | None = None


def product(
    outputs: int,
    inputs: int,
    rows: int,
    dtype: str,
    ending: Ending,
    *,
    norm: bool,
    heads: Heads | None,
    hopper: bool,
    room: int = WHOLE,
) -> Product | None:
    """The fastest of our kernels for a product; None where cuBLAS and the small kernels around it are faster still."""
    shape = skinny_shape(outputs, inputs, rows, ending, dtype, room) if hopper else None
    if shape is not None:
        return Product(skinny(outputs, inputs, rows, dtype, ending, shape, norm=norm, heads=heads), shape)
    if gemv_pays(outputs, inputs, rows, ending):
        return Product(gemv(outputs, inputs, rows, dtype, ending, norm=norm, heads=heads))
    return None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A product of a decode step; `norm`: its input is normalized first."""

    outputs: int
    inputs: int
    ending: Ending
    norm: bool


def wanted(config: ModelConfig) -> list[Wanted]:
    """By the layers, and by the head at the end of a step."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        Wanted(q + 2 * kv, hidden, Ending.ROPE, True),
        Wanted(hidden, q, Ending.RESIDUAL, False),
        Wanted(inner, hidden, Ending.SILU, True),
        Wanted(hidden, inner, Ending.RESIDUAL, False),
        Wanted(config.vocab_size, hidden, Ending.LOGITS, False),
    ]
