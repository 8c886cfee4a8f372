"""How wide.cu cuts a product of 65 to 256 rows on Hopper. Plain values, like those of engine.backend.launches.

The cuts were measured on an H200 with the shapes of Llama-3-8B, at 128 and 256 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend.launches import Heads, Launch, over
from engine.backend.nvcc import kernel
from engine.backend.products import Ending
from engine.config import DTYPES

_MULTIPROCESSORS = 132
_BUSY = 120  # blocks; fewer leave too much of the card without work
_RING = 219 << 10  # bytes of shared memory, of 227 KiB, for what is under way


@dataclass(frozen=True, slots=True)
class WideShape:
    """Rows of the weight and 64-row tiles of x per block, warpgroups that share the tiles, stages of 64 inputs that are
    under way, and blocks that share K."""

    columns: int
    tiles: int
    groups: int
    stages: int
    split: int

    @property
    def rows(self) -> int:
        return 64 * self.tiles

    @property
    def inputs(self) -> int:
        """Of one stage of all blocks that share K."""
        return 64 * self.split

    @property
    def shared(self) -> int:
        """Bytes: the ring of stages, which the sums of blocks that share K replace, at a multiple of 1024."""
        ring = self.stages * (self.rows + self.columns) * 128
        return 1024 + (max(ring, 4 * self.rows * (self.columns + 8)) if self.split > 1 else ring)

    def outputs(self, ending: Ending) -> int:
        """Of one block."""
        return self.columns // 2 if ending is Ending.SILU else self.columns


def wide(
    outputs: int,
    inputs: int,
    rows: int,
    dtype: str,
    ending: Ending,
    shape: WideShape,
    *,
    norm: bool = False,
    heads: Heads | None = None,
) -> Launch:
    """x [rows, inputs] times a weight [outputs, inputs], which has the norm's gain in it with `norm`.

    Arguments: tensor maps of w (boxes of shape.outputs(ending) rows) and x (of shape.rows), bias or 0 (0 with SILU),
    out, squares or 0, rows, outputs, stages of a block, pieces (ints), eps (float) and, with ROPE, ROPE_ARGS. Squares
    are float32 [pieces, rows], sums of squares of a row: with `norm` of x, which is read; with RESIDUAL and 64 or 128
    columns those of out, which are written, one piece for each block of outputs.
    """
    assert (ending is Ending.ROPE) == (heads is not None), "heads are for ROPE, which needs them"
    assert inputs % shape.inputs == 0, f"{inputs} inputs do not split"
    each = shape.outputs(ending)
    assert outputs % each == 0, f"{outputs} outputs are no whole blocks"
    settings = {
        "COLS": shape.columns,
        "TILES": shape.tiles,
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
        "SPLIT": shape.split,
        "NORM": int(norm),
        "EPILOGUE": int(ending),
        "DTYPE": DTYPES.index(dtype),
    }
    if heads is not None:
        settings |= heads.settings
    grid = (outputs // each * shape.split, over(rows, shape.rows))
    return Launch(kernel("wide", **settings), "wide", grid, 128 * shape.groups, shape.shared)


def wide_shape(outputs: int, inputs: int, rows: int, ending: Ending, dtype: str) -> WideShape | None:
    """The cut for a product on a card of 9.0: one wave of blocks, each with as few rows of the weight as that takes.
    None where that does not come out even, and where other kernels are faster."""
    if dtype == "float32" or ending is Ending.LOGITS or not 64 < rows <= 256 or inputs < 2048:
        return None
    split = 1 if ending is Ending.SILU else 2
    tiles = over(rows, 64)
    for columns in (64, 96, 128, 160, 192, 224):
        each = columns // 2 if ending is Ending.SILU else columns
        blocks = outputs // each * split
        if outputs % each == 0 and inputs % (64 * split) == 0 and _BUSY <= blocks <= _MULTIPROCESSORS:
            stages = min(8, _RING // (128 * (64 * tiles + columns)))
            if columns == 224 and tiles == 2:
                stages = 4  # a fifth costs time
            return WideShape(columns, tiles, 3 if tiles == 3 else 2, stages, split)
    return None
