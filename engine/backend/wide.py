"""How wide.cu cuts the gate and up product of 65 to 256 rows on Hopper. Plain values, like those of
engine.backend.launches.

Measured on an H200 with the shapes of Llama-3-8B, within a step: 95 us at 256 rows, where cuBLAS and silu_mul take 110;
there the card's 700 W are the limit, and what saves instructions saves time. The other products of so many rows are
cuBLAS's from 129 rows on: ours of this kind, with what is around them built in, took as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend.launches import Launch, over
from engine.backend.nvcc import kernel
from engine.config import DTYPES

_ROWS = range(65, 257)
_MULTIPROCESSORS = 132
_BUSY = 120  # blocks; fewer leave too much of the card without work
_RING = 219 << 10  # bytes of shared memory, of 227 KiB, for what is under way


@dataclass(frozen=True, slots=True)
class WideShape:
    """Rows of the weight (half of them gate, half up) and 64-row tiles of x per block, warpgroups that share the tiles,
    stages of 64 inputs that are under way."""

    columns: int
    tiles: int
    groups: int
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.tiles

    @property
    def outputs(self) -> int:
        """Of one block."""
        return self.columns // 2

    @property
    def shared(self) -> int:
        """Bytes: the ring of stages, at a multiple of 1024."""
        return 1024 + self.stages * (self.rows + self.columns) * 128


def wide(outputs: int, rows: int, dtype: str, shape: WideShape) -> Launch:
    """silu(gate) * up of x [rows, inputs] and a weight [2 * outputs, inputs], gate before up.

    Arguments: tensor maps of the weight (boxes of shape.outputs rows) and of x (of shape.rows), out [rows, outputs],
    rows, outputs, inputs / 64.
    """
    assert outputs % shape.outputs == 0, f"{outputs} outputs are no whole blocks"
    settings = {
        "COLS": shape.columns,
        "TILES": shape.tiles,
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
        "DTYPE": DTYPES.index(dtype),
    }
    grid = (outputs // shape.outputs, over(rows, shape.rows))
    return Launch(kernel("wide", **settings), "wide", grid, 128 * shape.groups, shape.shared)


def wide_shape(outputs: int, inputs: int, rows: int, dtype: str) -> WideShape | None:
    """The cut for a product on a card of 9.0: one wave of blocks, each with as few rows of the weight as that takes.
    None where that does not come out even, and where other kernels are faster."""
    if dtype == "float32" or rows not in _ROWS or inputs < 4096 or inputs % 64 != 0:
        return None
    tiles = over(rows, 64)
    for columns in (64, 96, 128, 160, 192, 224):
        if outputs % (columns // 2) == 0 and _BUSY <= outputs // (columns // 2) <= _MULTIPROCESSORS:
            stages = min(8, _RING // (128 * (64 * tiles + columns)))
            if columns == 224 and tiles == 2:
                stages = 4  # a fifth costs time
            return WideShape(columns, tiles, 3 if tiles == 3 else 2, stages)
    return None
