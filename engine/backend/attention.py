"""Launches paged decode attention on CUDA: which kernel a model needs, what it needs of the card, and its two calls.

`plan` runs once a step, before the first layer; `run` once a layer. Both take raw device pointers and are recorded by a
stream capture: lengths and tables are read on the device, so a graph serves every length. Owns the plan and the
partial sums; never the cache, the tables or the lengths. csrc/attention_plan.cuh has the layout that both share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backend.launches import AHEAD, Launch
from engine.backend.nvcc import DEFAULT_CACHE_DIR, Kernel, architecture, cubin, kernel

HEAD_DIMS = (64, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")  # the kernels' DTYPE is the index

_PLAN_THREADS = 1024
_HEADER, _RECORD = 32, 64  # int32
_RESERVED = 1024 + 128  # bytes of shared memory per block: the driver's, and what is declared in the kernel
_WARPS = 4
_IN_FLIGHT = 64 << 10  # bytes on a multiprocessor, by which an H200's memory is saturated


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
    """How one kernel uses one card: warps of a block, stages of 16 tokens in each one's ring, buffers between them,
    blocks on a multiprocessor.

    `flight`: stages that are on their way while a warp attends, the most that helps; a ring of more than one beyond
    them is filled while the kernel before this one still runs. `lets_early`: the kernel behind may start as soon as
    this one has its inputs, not when it ends. `merge`: the units (16 tokens of a KV head) for which it pays to have no
    row split, see csrc/plan.cu."""

    warps: int
    stages: int
    buffers: int
    ctas: int
    shared_bytes: int
    flight: int
    lets_early: bool = False
    merge: int = 0


# For head dim 64, where the products beside attention take as long as it does: what lies in the rings when it has its
# inputs was read while the memory would idle, and a merge takes up to a third of its time. The cuts are arguments of
# `fitted`; measured on an H200 in a 135M step. What leaves room for the products of others:
_SHARING = (8, 3, 2, 1, 2, False, 20)
# And what a batch has that is alone: by the least number of rows, whether the kernel behind may start early. It may not
# where that one's blocks would crowd on the multiprocessors that attention leaves free: up to 7% slower then, 4 to 13%
# faster below 9 rows.
_ALONE = ((16, 3, 1, 1, 1), (8, 6, 1, 1, 2))  # the second where the sums of 8 query heads leave no room for the first
_ALONE_MERGE = 99
_ALONE_LETS_EARLY = ((1, True), (9, False), (65, True))


def fitted(
    shape: AttentionShape, warps: int, stages: int, buffers: int, ctas: int = 1, flight: int = 0,
    lets_early: bool = False, merge: int = 0,
) -> Geometry:  # fmt: skip
    """Without a `flight`, all stages but the one that is worked on."""
    ring = stages * warps * 16 * shape.head_dim * 2 * 2
    sums = buffers * warps * shape.unit_heads * (shape.head_dim + 6) * 4
    return Geometry(warps, stages, buffers, ctas, ring + sums, flight or stages - 1, lets_early, merge)


def geometries(shape: AttentionShape, shared_per_multiprocessor: int) -> list[tuple[int, Geometry]]:
    """For a batch that has the card to itself: each with the least number of rows that it is for, from 1 on."""
    for cut in _ALONE if _narrow(shape) else ():
        found = [(least, fitted(shape, *cut, early, _ALONE_MERGE)) for least, early in _ALONE_LETS_EARLY]
        if found[0][1].shared_bytes <= shared_per_multiprocessor - _RESERVED:
            return found
    return [(1, geometry(shape, shared_per_multiprocessor))]


def _narrow(shape: AttentionShape) -> bool:
    return shape.dtype != "float32" and shape.head_dim == 64 and shape.group <= 8


def geometry(shape: AttentionShape, shared_per_multiprocessor: int) -> Geometry:
    """Beside others' products, and for batches for which `geometries` knows nothing faster: two blocks of two buffers
    where they fit; as many stages as keep _IN_FLIGHT on their way, more is slower."""
    if shape.dtype == "float32":
        return Geometry(_WARPS, stages=1, buffers=1, ctas=4, shared_bytes=0, flight=1)
    if _narrow(shape):
        found = fitted(shape, *_SHARING)
        if found.shared_bytes <= shared_per_multiprocessor - _RESERVED:
            return found
    stage = _WARPS * 16 * shape.head_dim * 2 * 2
    for ctas, buffers in ((2, 2), (2, 1), (1, 2), (1, 1)):
        enough = 1 + -(-_IN_FLIGHT // (ctas * stage))
        for stages in range(enough, 1, -1):
            found = fitted(shape, _WARPS, stages, buffers, ctas)
            if found.shared_bytes <= shared_per_multiprocessor // ctas - _RESERVED:
                return found
    room = shared_per_multiprocessor
    raise ValueError(f"head dim {shape.head_dim} needs more shared memory than this card's {room} bytes")


def kernels(shape: AttentionShape, chosen: Geometry) -> tuple[Kernel, Kernel]:
    """The planner and the attention."""
    settings = {
        "DTYPE": DTYPES.index(shape.dtype),
        "HEAD_DIM": shape.head_dim,
        "GROUP": shape.group,
        "BLOCK_SIZE": shape.block_size,
        "WINDOW": shape.window,
        "SOFTCAP": int(shape.softcap > 0),
        "WARPS": chosen.warps,
        "STAGES": chosen.stages,
        "BUFFERS": chosen.buffers,
        "CTAS": chosen.ctas,
    }
    attending = {"FLIGHT": chosen.flight, "LETS_EARLY": int(chosen.lets_early)}
    return kernel("plan", **settings, MERGE=chosen.merge), kernel("paged_attention", **settings, **attending)


def step_launches(shape: AttentionShape, chosen: Geometry, multiprocessors: int) -> tuple[Launch, Launch]:
    """The planner, whose shared memory depends on the rows, and the attention."""
    planner, attention = kernels(shape, chosen)
    grid = multiprocessors * chosen.ctas
    return (
        Launch(planner, "plan_attention", (1, 1), _PLAN_THREADS),
        Launch(attention, "paged_attention", (grid, 1), 32 * chosen.warps, chosen.shared_bytes),
    )


def plan_shared(rows: int) -> int:
    """Bytes of shared memory that the planner needs."""
    return 20 * rows


def plan_words(shape: AttentionShape, kv_heads: int, grid: int, max_rows: int) -> int:
    """int32 values of a plan, as in attention_plan.cuh."""
    items = max_rows * kv_heads * shape.units_per_kv_head
    return _HEADER + grid * _RECORD + 4 * (items + 1) + items


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
        self._plan = _function(cubin(planner, arch, cache_dir), "plan_attention", "PPPiiii", plan_shared(max_rows))
        self._run = _function(
            cubin(attention, arch, cache_dir),
            "paged_attention",
            f"PPPPPPqiiiiffi4x{AHEAD.size}s",
            self.geometry.shared_bytes,
        )
        self.plan_words = plan_words(shape, kv_heads, self.grid, max_rows)
        self.plan_memory = cuda.mem_alloc(4 * self.plan_words)
        self.partial_words = 2 * self.grid * shape.partial
        self.partials = cuda.mem_alloc(4 * self.partial_words)

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
            shared_size=plan_shared(rows),
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
            (32 * self.geometry.warps, 1, 1),
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
            0,
            bytes(AHEAD.size),
            shared_size=self.geometry.shared_bytes,
        )


def _function(compiled: Path, name: str, arguments: str, shared_bytes: int) -> Any:
    import pycuda.driver as cuda

    function = cuda.module_from_file(str(compiled)).get_function(name)
    if shared_bytes > 48 * 1024:
        function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    function.prepare(arguments)
    return function
