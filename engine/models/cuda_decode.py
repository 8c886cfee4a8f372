"""A decode step of the Llama family on CUDA: a batch whose state lives on the card, and reads nothing from the host.

So a graph may record it. Owns what lies between its kernels, the plans of its attention and its streams but the first;
never the state, the cache or that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine.backend import attention, lanes, launches
from engine.backend.cuda import Gpu, Long
from engine.backend.launches import Heads, Launch
from engine.backend.products import WHOLE, Ending, wanted
from engine.backend.wide import wide, wide_shape
from engine.kv_cache import TORCH_DTYPES
from engine.messages import KvLayout
from engine.models.cuda_products import Products, add_linear, fold_norms, linear
from engine.models.llama import Llama, LlamaLayer

_AHEAD_BYTES = 36 << 20  # of weights that attention of a lone row brings into the L2


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens sit: int32 tensors on the card, as ROPE_ARGS has them."""

    positions: Tensor  # [tokens]
    tables: Tensor  # [rows, width]
    table_rows: Tensor | None  # [tokens]; None: each its own


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    tokens: Tensor  # int32 [rows]
    lengths: Tensor  # int32 [rows]
    places: Places

    def part(self, first: int, last: int) -> DecodeInputs:
        places = self.places
        rows = Places(places.positions[first:last], places.tables[first:last], None)
        return DecodeInputs(self.tokens[first:last], self.lengths[first:last], rows)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What lies between the kernels of a decode step, [rows, ...] each."""

    x: Tensor  # the residual stream
    h: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    inner: Tensor

    def part(self, first: int, last: int) -> Workspace:
        return Workspace(*(getattr(self, field.name)[first:last] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, and what the rows on it share with no others that run meanwhile: the plan and the partials of their
    attention.

    Products take at most `room` bytes of a multiprocessor's shared memory."""

    gpu: Gpu
    planner: Launch
    attention: Launch
    plan: Tensor
    partials: Tensor
    room: int

    @property
    def alone(self) -> bool:
        return self.room == WHOLE


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step, on their lane."""

    lane: Lane
    inputs: DecodeInputs
    at: Workspace

    @property
    def rows(self) -> int:
        return self.at.x.shape[0]


class DecodeSteps:
    """At most `max_rows` rows are decoded at a time. `rope` packs ROPE_ARGS for places, the KV cache's tensor and a
    layer."""

    def __init__(
        self, weights: Llama, layout: KvLayout, heads: Heads, gpu: Gpu, max_rows: int,
        rope: Callable[[Places, Tensor, int], bytes],
    ) -> None:  # fmt: skip
        config = weights.config
        self.weights, self.config, self.dtype = weights, config, layout.dtype
        self._gpu, self._heads, self._rope = gpu, heads, rope
        self._q = config.num_heads * config.head_dim
        self._qkv = self._q + 2 * config.num_kv_heads * config.head_dim
        shape = attention.AttentionShape(
            layout.dtype, config.head_dim, config.num_heads // config.num_kv_heads, layout.block_size,
            window=config.sliding_window or 0,
        )  # fmt: skip
        found = attention.geometries(shape, gpu.shared_per_multiprocessor)
        launched = [attention.step_launches(shape, geometry, gpu.multiprocessors) for _, geometry in found]
        grid = launched[0][1].grid[0]
        assert all(attend.grid[0] == grid for _, attend in launched), "batches of one stream share plan and partials"

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=gpu.device)

        def values(width: int) -> Tensor:
            return torch.zeros(max_rows, width, dtype=TORCH_DTYPES[layout.dtype], device=gpu.device)

        def lane(on: Gpu, planner: Launch, attend: Launch, room: int) -> Lane:
            plan = ints(attention.plan_words(shape, config.num_kv_heads, grid, max_rows))
            partials = torch.zeros(2 * grid * shape.partial, dtype=torch.float32, device=gpu.device)
            return Lane(on, planner, attend, plan, partials, room)

        whole = lane(gpu, *launched[0], WHOLE)
        self._whole = [  # by the least number of rows
            (least, replace(whole, planner=planner, attention=attend))
            for (least, _), (planner, attend) in zip(found, launched, strict=True)
        ]
        self._halves: tuple[Lane, ...] = ()
        sharing = attention.geometry(shape, gpu.shared_per_multiprocessor)
        planner, attend = attention.step_launches(shape, sharing, gpu.multiprocessors)
        half = lanes.lane(config.hidden_size, attend, sharing.ctas, gpu.shared_per_multiprocessor)
        if half is not None and gpu.clusters:
            self._halves = lane(gpu, planner, *half), lane(gpu.twin(), planner, *half)
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = hidden, hidden, self._qkv, self._q, 2 * inner, inner
        self._at = at = Workspace(*map(values, widths))
        read = (at.x, at.h, at.attended, at.inner)
        self._products = Products(gpu, layout.dtype, self._heads, config.rms_norm_eps, read)
        if gpu.clusters and layout.dtype != "float32":
            fold_norms(weights)
        self._logits = torch.zeros(max_rows, config.vocab_size, dtype=torch.float32, device=gpu.device)

    def decode(self, inputs: DecodeInputs, rows: int, pool: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of the first `rows` rows, float32 or of the element type; overwritten next time."""
        parts, layers = self._parts(inputs, rows), len(self.weights.layers)
        for part in reversed(parts):  # the second half first: it waits for all before the step, not for the other half
            if part is not parts[0]:
                part.lane.gpu.stream.wait_stream(self._gpu.stream)
            with part.lane.gpu.on_stream():
                self._begin(part)
                self._attend(part, 0, pool)
        for index in range(layers):
            for part in parts:
                with part.lane.gpu.on_stream():
                    self._feed_forward(part, index)
                    if index + 1 < layers:
                        self._attend(part, index + 1, pool)
        for part in parts[1:]:
            self._gpu.stream.wait_stream(part.lane.gpu.stream)
        return self._head(self._at.part(0, rows), overlap=len(parts) == 1)

    def _parts(self, inputs: DecodeInputs, rows: int) -> list[Part]:
        if not self._halves or rows not in lanes.ROWS:
            lane = next(lane for least, lane in reversed(self._whole) if rows >= least)
            return [Part(lane, inputs.part(0, rows), self._at.part(0, rows))]
        return [
            Part(lane, inputs.part(*both), self._at.part(*both))
            for lane, both in zip(self._halves, lanes.halves(rows), strict=True)
        ]

    def _begin(self, part: Part) -> None:
        lane, inputs, rows = part.lane, part.inputs, part.rows
        plan = replace(lane.planner, shared=attention.plan_shared(rows))
        width = inputs.places.tables.stride(0)
        lane.gpu.launch(plan, inputs.lengths, inputs.places.tables, lane.plan, rows, width, self.config.num_kv_heads,
                        lane.attention.grid[0], overlap=lane.alone)  # fmt: skip
        embed = launches.embed(self.config.hidden_size, rows, self.dtype)
        lane.gpu.launch(embed, self.weights.embed, inputs.tokens, part.at.x)

    def _attend(self, part: Part, index: int, pool: Tensor) -> None:
        config, layer = self.config, self.weights.layers[index]
        lane, at, places = part.lane, part.at, part.inputs.places
        self._qkv_step(part, layer, self._rope(places, pool, index))
        lane.gpu.launch(
            lane.attention, at.qkv, pool[0, index], at.attended, places.tables, lane.plan, lane.partials,
            Long(pool.stride(0)), self._qkv, places.tables.stride(0), part.rows, config.num_kv_heads,
            config.head_dim**-0.5, 0.0, int(index > 0), self._ahead(part, index), yields=not lane.alone,
        )  # fmt: skip

    def _feed_forward(self, part: Part, index: int) -> None:
        at, layer = part.at, self.weights.layers[index]
        self._add_step(part, at.attended, layer.out, layer.out_bias)
        self._mlp_step(part, layer)

    def _wide(self, rows: int) -> Launch | None:
        """gate_up of many rows in one launch, whose input is normalized already; None where others are faster."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        shape = wide_shape(inner, hidden, rows, self.dtype) if self._gpu.clusters else None
        return None if shape is None else wide(inner, rows, self.dtype, shape)

    def _ahead(self, part: Part, index: int) -> bytes:
        """The weights behind a layer's attention, as far as they fit into the L2. On an H200 this is worth 13% of a
        135M model's step for a lone row and 2% of an 8B one's, elsewhere nothing."""
        layers = self.weights.layers
        layer, behind = layers[index], [one.qkv for one in layers[index + 1 : index + 2]]
        weights = [layer.out, layer.gate_up, layer.down, *behind]
        found: list[tuple[int, int]] = []
        room = _AHEAD_BYTES if part.rows == 1 else 0
        for weight in weights:
            room -= weight.nbytes
            if room >= 0:
                found.append((weight.data_ptr(), weight.nbytes))
        found += [(0, 0)] * (4 - len(found))
        return launches.AHEAD.pack(*(at for at, _ in found), *(size for _, size in found))

    def _head(self, at: Workspace, *, overlap: bool) -> Tensor:
        weights, rows, outputs = self.weights, at.x.shape[0], self.config.vocab_size
        self._norm(self._gpu, at, weights.norm, overlap=overlap)
        if self._products.launch(self._gpu, weights.head, at.h, None, None, self._logits, Ending.LOGITS):
            return self._logits[:rows]
        logits = self._logits.view(-1).view(at.h.dtype)[: rows * outputs].view(rows, outputs)
        torch.mm(at.h, weights.head, out=logits)
        return logits

    def kernels(self, buckets: Sequence[int]) -> list[Launch]:
        """All launches of decode steps, to be compiled ahead; prompts need no others."""
        config, used = self.config, [*(lane for _, lane in self._whole), *self._halves]
        found = [one for lane in used for one in (lane.planner, lane.attention)]
        hidden, inner = config.hidden_size, config.intermediate_size
        counts = {(rows, WHOLE) for rows in buckets}
        for lane in self._halves:
            split = [both for rows in buckets if rows in lanes.ROWS for both in lanes.halves(rows)]
            counts |= {(last - first, lane.room) for first, last in split}
        for rows, room in sorted(counts):
            for each in wanted(config):
                product = self._products.find(each.outputs, each.inputs, rows, each.ending, each.norm, room)
                if product is not None:
                    found.append(product.launch)
        found += [one for rows in buckets if (one := self._wide(rows)) is not None]
        found.append(launches.rms_norm(hidden, 1, self.dtype))
        found.append(launches.rope_write(self._heads, 1, self.dtype))
        found.append(launches.gather_tiles(self._heads, 1, self.dtype))
        found.append(launches.silu_mul(inner, 1, self.dtype))
        return found

    def _qkv_step(self, part: Part, layer: LlamaLayer, rope: bytes) -> None:
        lane, at, bias, norm = part.lane, part.at, layer.qkv_bias, layer.attention_norm
        if not self._products.launch(lane.gpu, layer.qkv, at.x, norm, bias, at.qkv, Ending.ROPE, rope, lane.room):
            self._norm(lane.gpu, at, norm)
            linear(at.h, layer.qkv, bias, at.qkv)
            lane.gpu.launch(launches.rope_write(self._heads, part.rows, self.dtype), at.qkv, part.rows, rope)

    def _mlp_step(self, part: Part, layer: LlamaLayer) -> None:
        gpu, room, at = part.lane.gpu, part.lane.room, part.at
        bias, norm = layer.gate_up_bias, layer.mlp_norm
        if bias is None and self._wide(part.rows) is not None:
            self._norm(gpu, at, norm)
            self._products.launch_wide(gpu, layer.gate_up, at.h, at.inner)
        elif not self._products.launch(gpu, layer.gate_up, at.x, norm, bias, at.inner, Ending.SILU, None, room):
            self._norm(gpu, at, norm)
            linear(at.h, layer.gate_up, bias, at.gate_up)
            silu = launches.silu_mul(self.config.intermediate_size, part.rows, self.dtype)
            gpu.launch(silu, at.gate_up, at.inner, part.rows)
        self._add_step(part, at.inner, layer.down, layer.down_bias)

    def _add_step(self, part: Part, more: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        lane, x = part.lane, part.at.x
        if not self._products.launch(lane.gpu, weight, more, None, bias, x, Ending.RESIDUAL, None, lane.room):
            add_linear(x, more, weight, bias)

    def _norm(self, gpu: Gpu, at: Workspace, weight: Tensor, *, overlap: bool = True) -> None:
        rows, hidden = at.x.shape
        norm = launches.rms_norm(hidden, rows, self.dtype)
        gpu.launch(norm, at.x, None, weight, at.h, self.config.rms_norm_eps, overlap=overlap)
