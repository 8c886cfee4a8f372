"""Which kernel, with which settings, grid, block and shared memory, for each operation but attention and products.

Plain values: whoever owns the card loads the cubin, packs the arguments in the order of the .cu file and launches.
The structures that kernels take by value, or read per row, have their layout here beside their geometry.
"""

from __future__ import annotations

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
# struct Ahead of attention_plan.cuh: addresses of weights, bytes of each.
AHEAD = struct.Struct("<4Q4i")
RING_HEADER = 8  # ints before an entry's tokens, in advance.cu

RAISE_SHARED = 32 << 10  # a function may use 48 KiB unasked, what it declares itself included
_COPY_PIECE = 256 * 4 * 16  # bytes of a block that one block of threads copies, in blocks.cu
_DIGEST_THREADS = 512  # that copy and digest, in blocks.cu


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


def rope_write(heads: Heads, tokens: int, dtype: str) -> Launch:
    """Arguments: qkv, tokens (int), ROPE_ARGS."""
    pieces = (heads.heads + 2 * heads.kv_heads) * heads.head_dim // _per_16_bytes(dtype)
    settings = {"DTYPE": DTYPES.index(dtype), **heads.settings}
    return Launch(kernel("rope_write", **settings), "rope_write", (over(tokens * pieces, 256), 1), 256)


def rms_norm(hidden: int, rows: int, dtype: str) -> Launch:
    """Arguments: x, delta or 0, weight, out, eps (float). x += delta first, in place."""
    return Launch(_hidden(hidden, dtype), "rms_norm", (rows, 1), 256)


def embed(hidden: int, rows: int, dtype: str) -> Launch:
    """Arguments: table, tokens, out."""
    return Launch(_hidden(hidden, dtype), "embed", (rows, 1), 256)


def silu_mul(inner: int, rows: int, dtype: str) -> Launch:
    """Arguments: gate_up, out, rows (int)."""
    blocks = over(rows * inner, 256 * _per_16_bytes(dtype))
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
    return Launch(_state(vocab, block_size), "advance", (1, 1), min(1024, over(rows, 32) * 32))


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
    grid = (over(block_bytes, _COPY_PIECE), blocks)
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
    return min(most, blocks * over(block_bytes, _DIGEST_THREADS * 4 * 16))


def gather_tiles(heads: Heads, blocks: int, dtype: str) -> Launch:
    """Arguments: out [2, kv_heads, blocks * block_size, head_dim], a layer's K in block 0, ids, bytes from one block to
    the next (Long)."""
    tile = heads.block_size * heads.head_dim * 16 // _per_16_bytes(dtype)
    return Launch(kernel("gather_tiles", TILES=2 * heads.kv_heads, TILE_BYTES=tile), "gather_tiles", (blocks, 1), 256)


def zero_blocks(block_bytes: int, blocks: int) -> Launch:
    """Arguments: pool, ids. At most 65,535 blocks a launch."""
    grid = (over(block_bytes, _COPY_PIECE), blocks)
    return Launch(kernel("blocks", BLOCK_BYTES=block_bytes), "zero_blocks", grid, 256)


def _hidden(hidden: int, dtype: str) -> Kernel:
    return kernel("rms_norm", HIDDEN=hidden, DTYPE=DTYPES.index(dtype))


def _state(vocab: int, block_size: int) -> Kernel:
    return kernel("advance", VOCAB=vocab, BLOCK_SIZE=block_size)


def _per_16_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 8


def over(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)
