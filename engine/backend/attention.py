"""Launches paged decode attention on CUDA: which kernel a model needs, what it needs of the card, and its two calls.

`plan` runs once a step, before the first layer; `run` once a layer. Both take raw device pointers and are recorded by a
stream capture: lengths and tables are read on the device, so a graph serves every length. Owns the plan and the
partial sums; never the cache, the tables or the lengths. csrc/attention_plan.cuh has the layout that both share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backend.nvcc import DEFAULT_CACHE_DIR, Kernel, architecture, cubin, kernel

HEAD_DIMS = (64, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")  # the kernels' DTYPE is the index

_WARPS = 4
_TILE = 16 * _WARPS  # tokens
_THREADS = 32 * _WARPS
_PLAN_THREADS = 1024
_HEADER = 8  # int32
_RESERVED = 1024 + 512  # bytes of shared memory per block: the driver's, and what is declared in the kernel
_MAX_STAGES = 6


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is fixed when the kernel is compiled. `window` and `softcap` are 0 where the model has none."""

    dtype: str
    head_dim: int
    group: int  # query heads per KV head
    block_size: int
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"attention on CUDA has no kernel for {self.dtype}; it has {', '.join(DTYPES)}")
        for name, value, known in (
            ("head dim", self.head_dim, HEAD_DIMS),
            ("block size", self.block_size, BLOCK_SIZES),
        ):
            if value not in known:
                raise ValueError(f"{name} {value} is not supported on CUDA; supported are {', '.join(map(str, known))}")

    @property
    def unit_heads(self) -> int:
        """Query heads that one pass over K and V serves."""
        return min(self.group, 8 if self.group <= 8 or self.head_dim > 128 else 16)

    @property
    def units_per_kv_head(self) -> int:
        return -(-self.group // self.unit_heads)

    @property
    def partial(self) -> int:
        """float32 values of one unfinished piece: sums, maxima, totals."""
        return self.unit_heads * self.head_dim + -(-2 * self.unit_heads // 4) * 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one kernel uses one card: stages of copies in flight, and blocks that share a multiprocessor."""

    stages: int
    ctas: int
    shared_bytes: int

    @property
    def record(self) -> int:
        return 8 + self.stages * _WARPS


def geometry(shape: AttentionShape, shared_per_multiprocessor: int) -> Geometry:
    """Two blocks with at least three stages each where they fit, else one."""
    if shape.dtype == "float32":
        return Geometry(stages=1, ctas=4, shared_bytes=0)
    stage = _TILE * shape.head_dim * 2 * 2
    merge = _WARPS * min(shape.unit_heads, 8) * (shape.head_dim + 4) * 4
    for ctas in (2, 1):
        stages = min((shared_per_multiprocessor // ctas - _RESERVED - merge) // stage, _MAX_STAGES)
        if stages >= 3 or (ctas == 1 and stages == 2):
            return Geometry(stages, ctas, stages * stage + merge)
    raise ValueError(
        f"head dim {shape.head_dim} needs more shared memory than this card's {shared_per_multiprocessor} bytes"
    )


def kernels(shape: AttentionShape, chosen: Geometry) -> tuple[Kernel, Kernel]:
    """The planner and the attention."""
    settings = {
        "DTYPE": DTYPES.index(shape.dtype),
        "HEAD_DIM": shape.head_dim,
        "GROUP": shape.group,
        "BLOCK_SIZE": shape.block_size,
        "WINDOW": shape.window,
        "SOFTCAP": int(shape.softcap > 0),
        "STAGES": chosen.stages,
        "CTAS": chosen.ctas,
    }
    return kernel("plan", **settings), kernel("paged_attention", **settings)


class PagedAttention:
    """On the current PyCUDA context. Buffers are allocated once, for at most `max_rows` rows."""

    def __init__(
        self,
        shape: AttentionShape,
        kv_heads: int,
        max_rows: int,
        chosen: Geometry | None = None,
        cache_dir: Path = DEFAULT_CACHE_DIR,
    ) -> None:
        import pycuda.driver as cuda

        device = cuda.Context.get_device()
        attributes = cuda.device_attribute
        self.shape = shape
        self.kv_heads = kv_heads
        self.max_rows = max_rows
        self.geometry = chosen or geometry(shape, device.get_attribute(attributes.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR))
        self.grid = device.get_attribute(attributes.MULTIPROCESSOR_COUNT) * self.geometry.ctas
        arch = architecture(*device.compute_capability())
        planner, attention = kernels(shape, self.geometry)
        self._plan = _function(cubin(planner, arch, cache_dir), "plan_attention", "PPPiiii", 4 * (max_rows + 1))
        self._run = _function(
            cubin(attention, arch, cache_dir), "paged_attention", "PPPPPPqiiiiff", self.geometry.shared_bytes
        )
        units = kv_heads * shape.units_per_kv_head
        words = _HEADER + self.grid * self.geometry.record + max_rows * (4 + units)
        self.plan_words = words
        self.plan_memory = cuda.mem_alloc(4 * words)
        self.partials = cuda.mem_alloc(4 * 2 * self.grid * shape.partial)

    def plan(self, stream: Any, lengths: int, tables: int, rows: int, table_stride: int) -> None:
        """lengths int32 [rows], 0 for an empty row; tables int32 [rows, table_stride]."""
        self._plan.prepared_async_call(
            (1, 1),
            (_PLAN_THREADS, 1, 1),
            stream,
            lengths,
            tables,
            int(self.plan_memory),
            rows,
            table_stride,
            self.kv_heads,
            self.grid,
            shared_size=4 * (rows + 1),
        )

    def run(
        self,
        stream: Any,
        q: int,
        q_stride: int,
        layer: int,
        block_stride: int,
        out: int,
        tables: int,
        rows: int,
        table_stride: int,
        scale: float,
    ) -> None:
        """q [rows, q_stride] with the query heads first; `layer` is the layer's K in block 0; strides are in elements;
        out [rows, heads, head_dim], zeros for an empty row. `rows`, `tables`, `table_stride` as they were planned.
        """
        self._run.prepared_async_call(
            (self.grid, 1),
            (_THREADS, 1, 1),
            stream,
            q,
            layer,
            out,
            tables,
            int(self.plan_memory),
            int(self.partials),
            block_stride,
            q_stride,
            table_stride,
            rows,
            self.kv_heads,
            scale,
            self.shape.softcap,
            shared_size=self.geometry.shared_bytes,
        )


def _function(compiled: Path, name: str, arguments: str, shared_bytes: int) -> Any:
    import pycuda.driver as cuda

    function = cuda.module_from_file(str(compiled)).get_function(name)
    if shared_bytes > 48 * 1024:
        function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    function.prepare(arguments)
    return function
