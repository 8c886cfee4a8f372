"""Which kernel, with which settings, grid, block and shared memory, for each operation other than attention.

Plain values: whoever owns the card loads the cubin, packs the arguments in the order of the .cu file and launches.
The structures that kernels take by value, or read per row, have their layout here beside their geometry.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from engine.backend.nvcc import Kernel, kernel
from engine.config import DTYPES

# struct RopeArgs of rope.cuh: rotation, positions, tables, table_rows, pool; table_width, layer.
ROPE_ARGS = struct.Struct("<5Q2i")
# struct Row of sample.cu: temperature, top_p, min_p, top_k, repetition, frequency, presence, min_tokens, seed, biases,
# ends, uses_counts.
SAMPLE_ROW = struct.Struct("<3fi3fiQ3i12x")
# struct State of advance.cu: tokens, positions, lengths, indices, remaining, tables, end_ids, ends, counts, counted;
# table_width, end_width.
ROW_STATE = struct.Struct("<10Q2i")
RING_HEADER = 8  # ints before an entry's tokens, in advance.cu

RAISE_SHARED = 32 << 10  # a function may use 48 KiB unasked, what it declares itself included
_COPY_PIECE = 256 * 4 * 16  # bytes of a block that one block of threads copies, in blocks.cu
_DIGEST_THREADS = 512  # that copy and digest, in blocks.cu


class Ending(enum.IntEnum):
    """What a product does with its sums; EPILOGUE of gemv.cu."""

    STORE = 0
    RESIDUAL = 1  # adds to what is there
    SILU = 2  # silu of the first half of the outputs times the second half
    ROPE = 3  # rotates Q and K, writes K and V to blocks
    LOGITS = 4  # float32, whatever the element type


@dataclass(frozen=True, slots=True)
class Launch:
    """`shared` is dynamic shared memory in bytes; above RAISE_SHARED the function's limit has to be raised first."""

    kernel: Kernel
    function: str
    grid: tuple[int, int]
    block: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """What the kernels that write KV must know of a model and its cache."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    layers: int

    @property
    def settings(self) -> dict[str, int]:
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "LAYERS": self.layers,
        }


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How gemv.cu cuts a product: 16-row tiles of the weight and 8-row tiles of x per block, warps, chunks
    of K that a warp has under way, their length, and whether two blocks share the work, which takes a card of 9.0."""

    tiles: int
    m_tiles: int
    warps: int
    stages: int
    chunk: int = 64
    split: int = 1


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
    clusters: bool = True,
) -> Launch:
    """x [rows, inputs] times a weight [outputs, inputs]; with SILU the weight has 2 * outputs rows. Cards before 9.0
    have no clusters.

    Arguments: w, x, norm, bias (each of these two 0 if there is none), out, rows (int), eps (float), ahead (0, or what
    a later kernel will read, for the L2), its bytes (int) and, with ROPE, ROPE_ARGS.
    """
    assert gemv_fits(outputs, inputs), f"no kernel for a product with {outputs} outputs and {inputs} inputs"
    assert (ending is Ending.ROPE) == (heads is not None), "heads are for ROPE, which needs them"
    cut = GemvShape(1 + (ending is Ending.SILU), m_tiles(rows), 8, 2)
    if dtype != "float32":  # whose kernel cuts nothing
        cut = shape or gemv_shape(outputs, inputs, rows, ending, clusters)
    settings = {
        "N": outputs,
        "K": inputs,
        "TILES": cut.tiles,
        "M_TILES": cut.m_tiles,
        "WARPS": cut.warps,
        "STAGES": cut.stages,
        "CHUNK": cut.chunk,
        "SPLIT": cut.split,
        "NORM": int(norm),
        "EPILOGUE": int(ending),
        "DTYPE": DTYPES.index(dtype),
    }
    if heads is not None:
        settings |= heads.settings
    if dtype == "float32":  # a warp has two outputs
        across, shared = _over(outputs, 2 * cut.warps), 0
    else:
        both = ending is Ending.SILU and cut.split == 1
        across = _over(outputs, 16 * (cut.tiles // 2 if both else cut.tiles)) * cut.split
        shared = gemv_shared(cut, norm)
    return Launch(kernel("gemv", **settings), "gemv", (across, _over(rows, 8 * cut.m_tiles)), cut.warps * 32, shared)


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


def gemv_shape(outputs: int, inputs: int, rows: int, ending: Ending, clusters: bool) -> GemvShape:
    """The cut for a product, from `python -m benchmarks.kernels_small --sweep` on an H200."""
    pair = 2 if ending is Ending.SILU else 1
    across = m_tiles(rows)
    tiles = outputs // 16
    if inputs < 2048:  # the time that it takes to begin and to end is everything
        chunks = inputs // 64
        warps = next((count for count in range(9, 3, -1) if chunks % count == 0), min(8, chunks))
        per_block = 2 if pair == 2 and across == 1 and tiles > 1 else 1
        return GemvShape(per_block * pair, across, warps, min(3, _over(chunks, warps)))
    if pair == 2:
        if across == 4 and clusters and tiles >= 7:
            return GemvShape(7, 4, 8, 1, chunk=32, split=2)
        return GemvShape(2, across, 8, 3, chunk=32) if across == 4 else GemvShape(2, across, 8, 4 if across == 1 else 2)
    per_block = _over(tiles, 132)
    if per_block == 3:
        return GemvShape(3, across, 8, 3 if across != 2 else 2, chunk=32 if across == 4 else 64)
    if across == 4 and ending is not Ending.RESIDUAL:  # a norm before it takes registers, too
        return GemvShape(min(2, tiles), across, 8, 3, chunk=32)
    return GemvShape(min(2, tiles), across, 8, 3 if across == 1 else 2)


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """How skinny.cu cuts a product: rows of x and 64-row tiles of the weight per block, warpgroups that share the
    tiles, stages of K that are under way, blocks that share K, and the 64s of K in a stage."""

    columns: int
    tiles: int
    groups: int
    stages: int
    split: int = 1
    depth: int = 1

    @property
    def inputs(self) -> int:
        """Of one stage of all blocks that share K."""
        return 64 * self.depth * self.split

    @property
    def shared(self) -> int:
        """Bytes: the ring of stages, which the sums replace at the end, at a multiple of 1024."""
        ring = self.stages * self.depth * (self.tiles * 64 + self.columns) * 128
        return 1024 + max(ring, 4 * self.columns * (self.tiles * 64 + 4))


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
    across = _over(outputs, shape.tiles * (32 if ending is Ending.SILU else 64))
    grid = (shape.split * _over(rows, shape.columns), across)
    return Launch(kernel("skinny", **settings), "skinny", grid, 128 * shape.groups + 32, shape.shared)


def weight_box(ending: Ending, shape: SkinnyShape) -> int:
    """Rows of the weight that one copy brings."""
    return 32 if ending is Ending.SILU and shape.tiles == 1 else 64


def skinny_shape(outputs: int, inputs: int, rows: int, ending: Ending, dtype: str) -> SkinnyShape | None:
    """The cut for a product on a card of 9.0, or None where gemv.cu or cuBLAS is faster; measured on an H200."""
    if dtype == "float32" or inputs % 64 != 0 or outputs % 64 != 0:
        return None
    if inputs < 2048:
        return _narrow_shape(inputs, rows, ending)
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


def _narrow_shape(inputs: int, rows: int, ending: Ending) -> SkinnyShape | None:
    """For few inputs: all of K under way at once, because the time that it takes to begin and to end is everything."""
    least = {Ending.LOGITS: 8, Ending.RESIDUAL: 32 if inputs < 1024 else 16, Ending.SILU: 16, Ending.ROPE: 32}
    if rows <= least[ending] or rows > (32 if ending is Ending.LOGITS else 256):
        return None
    if ending is Ending.LOGITS:
        return SkinnyShape(32, 2, 2, 2)
    split = 2 if ending is Ending.RESIDUAL and inputs % 384 == 0 and inputs >= 1024 else 1
    chunks = inputs // 64 // split
    depth = next(depth for depth in (3, 2, 1) if chunks % depth == 0)
    columns, tiles = 32, 1
    if ending is Ending.SILU:
        columns, tiles = (16, 1) if rows <= 32 else (32, 2) if rows <= 128 else (64, 2)
        depth = 1 if columns == 64 else depth
    elif ending is Ending.ROPE:
        columns = 16 if rows <= 128 else 32
    elif split == 2 and rows > 128:
        columns = 64
    stages = min(chunks // depth, (200 << 10) // (depth * 128 * (64 * tiles + columns)))
    return SkinnyShape(columns, tiles, tiles, stages, split, depth)


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
) -> Product | None:
    """The fastest of our kernels for a product; None where cuBLAS and the small kernels around it are faster still."""
    shape = skinny_shape(outputs, inputs, rows, ending, dtype) if hopper else None
    if shape is not None:
        return Product(skinny(outputs, inputs, rows, dtype, ending, shape, norm=norm, heads=heads), shape)
    if gemv_pays(outputs, inputs, rows, ending):
        return Product(gemv(outputs, inputs, rows, dtype, ending, norm=norm, heads=heads, clusters=hopper))
    return None


def rope_write(heads: Heads, tokens: int, dtype: str) -> Launch:
    """Arguments: qkv, tokens (int), ROPE_ARGS."""
    pieces = (heads.heads + 2 * heads.kv_heads) * heads.head_dim // _per_16_bytes(dtype)
    settings = {"DTYPE": DTYPES.index(dtype), **heads.settings}
    return Launch(kernel("rope_write", **settings), "rope_write", (_over(tokens * pieces, 256), 1), 256)


def rms_norm(hidden: int, rows: int, dtype: str) -> Launch:
    """Arguments: x, delta or 0, weight, out, eps (float). x += delta first, in place."""
    return Launch(_hidden(hidden, dtype), "rms_norm", (rows, 1), 256)


def embed(hidden: int, rows: int, dtype: str) -> Launch:
    """Arguments: table, tokens, out."""
    return Launch(_hidden(hidden, dtype), "embed", (rows, 1), 256)


def silu_mul(inner: int, rows: int, dtype: str) -> Launch:
    """Arguments: gate_up, out, rows (int)."""
    blocks = _over(rows * inner, 256 * _per_16_bytes(dtype))
    return Launch(kernel("silu_mul", INNER=inner, DTYPE=DTYPES.index(dtype)), "silu_mul", (blocks, 1), 256)


def sample(vocab: int, rows: int, dtype: str) -> Launch:
    """`dtype` is the logits'. Arguments: logits, rows of SAMPLE_ROW, positions, indices, counts or 0, bias_ids,
    bias_values, bias_width (int), end_ids, end_width (int), scratch [rows, vocab] float32, tokens."""
    return Launch(kernel("sample", VOCAB=vocab, DTYPE=DTYPES.index(dtype)), "sample", (rows, 1), 1024)


def logprobs(vocab: int, reports: int, dtype: str) -> Launch:
    """`dtype` is the logits'. Arguments: logits, rows, tokens, whether tokens are by row (int), k (int), out."""
    return Launch(kernel("logprobs", VOCAB=vocab, DTYPE=DTYPES.index(dtype)), "logprobs", (reports, 1), 1024)


def advance(vocab: int, block_size: int, rows: int) -> Launch:
    """Arguments: sampled, ROW_STATE, rows (int), ring, ring_entries (int), step, began or 0."""
    return Launch(_state(vocab, block_size), "advance", (1, 1), min(1024, _over(rows, 32) * 32))


def apply(vocab: int, block_size: int, runs: int) -> Launch:
    """Arguments: the state's array of ints, changes. `runs` is an upper limit that only spreads the work."""
    return Launch(_state(vocab, block_size), "apply", (runs, 1), 128)


def next_changes() -> Launch:
    """Like apply, from a ring of entries. Arguments: the state's array of ints, ring, ints of an entry (int), entries
    (int), the counter that `advance` moves on, where the card's clock goes or 0."""
    return Launch(kernel("next_changes"), "next_changes", (1, 1), 1024)


def count(vocab: int, block_size: int) -> Launch:
    """Arguments: one row of counts, prompt ids, their number (int), output ids, their number (int)."""
    return Launch(_state(vocab, block_size), "count", (1, 1), 1024)


def copy_blocks(block_bytes: int, blocks: int) -> Launch:
    """Arguments: to, from, to_ids or 0, from_ids or 0. At most 65,535 blocks a launch."""
    grid = (_over(block_bytes, _COPY_PIECE), blocks)
    return Launch(kernel("blocks", BLOCK_BYTES=block_bytes), "copy_blocks", grid, 256)


def copy_and_digest(block_bytes: int, blocks: int, ctas: int) -> Launch:
    """Arguments: to, from, to_ids, from_ids, sums (64 bits each, zero before), their number (int). `ctas` bounds how
    much of the card it takes: two fill half a multiprocessor."""
    return Launch(kernel("blocks", BLOCK_BYTES=block_bytes), "copy_and_digest", (_ctas(block_bytes, blocks, ctas), 1),
                  _DIGEST_THREADS)  # fmt: skip


def digest_blocks(block_bytes: int, blocks: int, ctas: int) -> Launch:
    """Arguments: pool, ids, sums (64 bits each, zero before), their number (int)."""
    return Launch(kernel("blocks", BLOCK_BYTES=block_bytes), "digest_blocks", (_ctas(block_bytes, blocks, ctas), 1),
                  _DIGEST_THREADS)  # fmt: skip


def _ctas(block_bytes: int, blocks: int, most: int) -> int:
    return min(most, blocks * _over(block_bytes, _DIGEST_THREADS * 4 * 16))


def gather_tiles(heads: Heads, blocks: int, dtype: str) -> Launch:
    """Arguments: out [2, kv_heads, blocks * block_size, head_dim], a layer's K in block 0, ids, bytes from one block to
    the next (Long)."""
    tile = heads.block_size * heads.head_dim * 16 // _per_16_bytes(dtype)
    return Launch(kernel("gather_tiles", TILES=2 * heads.kv_heads, TILE_BYTES=tile), "gather_tiles", (blocks, 1), 256)


def zero_blocks(block_bytes: int, blocks: int) -> Launch:
    """Arguments: pool, ids. At most 65,535 blocks a launch."""
    grid = (_over(block_bytes, _COPY_PIECE), blocks)
    return Launch(kernel("blocks", BLOCK_BYTES=block_bytes), "zero_blocks", grid, 256)


def _hidden(hidden: int, dtype: str) -> Kernel:
    return kernel("rms_norm", HIDDEN=hidden, DTYPE=DTYPES.index(dtype))


def _state(vocab: int, block_size: int) -> Kernel:
    return kernel("advance", VOCAB=vocab, BLOCK_SIZE=block_size)


def _per_16_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 8


def _over(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)
