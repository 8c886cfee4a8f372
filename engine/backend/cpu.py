"""The CPU backend: plain torch, and the specification that other backends agree with.

Attends through block tables: each layer gathers the K and V of the step's sequences from their blocks into a
workspace that lives for one call. With a row tile the same operations run in a fixed order on fixed shapes, so that
a token's bits depend neither on its batch mates nor on how its prompt was cut into chunks. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backend import Chunk, DecodeGroup, RowSpan, StepPlan
from engine.config import ModelConfig
from engine.kv_cache import KVCache

# A decode group may pad its tables to at most this multiple of the blocks that its sequences really have.
_PADDING = 1.25
# MKL copies the whole weight before a product with 4 to 15 rows, unless the product is narrow. Cut into slabs of
# columns, which are views, a product runs up to 2.4 times as fast (8 rows, [576, 49152]: 37.6 -> 15.6 ms).
_SLAB_ROWS = range(4, 16)
_SLAB_WIDTHS = (96, 64, 128, 192, 160, 80)


class CPUBackend:
    """See engine.backend.Backend for the shapes."""

    def rope_table(self, config: ModelConfig, positions: int) -> Tensor:
        frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        return torch.polar(torch.ones_like(angles), angles)

    def plan(self, spans: Sequence[RowSpan], table: Tensor, config: ModelConfig, cache: KVCache) -> StepPlan:
        size = cache.layout.block_size
        positions: list[int] = []
        places: list[int] = []  # block * block_size + offset
        for span in spans:
            steps = range(span.start, span.start + len(span.token_ids))
            positions.extend(steps)
            places.extend(span.blocks[position // size] * size + position % size for position in steps)
        decodes = sum(len(span.token_ids) == 1 for span in spans)
        chunks: list[Chunk] = []
        first = decodes
        for span in spans[decodes:]:
            assert len(span.token_ids) > 1, "spans of one token come first"
            chunks.append(_chunk(span, first, config, cache))
            first += len(span.token_ids)
        return StepPlan(
            token_ids=torch.tensor([token for span in spans for token in span.token_ids], dtype=torch.int64),
            rotation=table[torch.tensor(positions)].unsqueeze(1),
            written=_written(places, cache),
            decodes=_decode_groups(spans[:decodes], config, cache),
            chunks=chunks,
        )

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, row_tile: int | None) -> Tensor:
        if row_tile is None:
            out = _product(x, weight)
        else:
            rows = x.shape[0]
            padded = F.pad(x, (0, 0, 0, -rows % row_tile))
            out = torch.cat([_product(tile, weight) for tile in padded.split(row_tile)])[:rows]
        return out if bias is None else out.add_(bias)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, row_tile: int | None
    ) -> Tensor:
        if row_tile is None and bias is None and x.shape[0] not in _SLAB_ROWS:
            return residual.addmm_(x, weight)
        return residual.add_(self.linear(x, weight, bias, row_tile))

    def rope_and_write(self, qkv: Tensor, layer: int, plan: StepPlan, cache: KVCache) -> None:
        kv_heads = cache.layout.num_kv_heads
        rotated = qkv[:, :-kv_heads]
        if qkv.dtype == torch.float32:
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(plan.rotation)
        else:
            pairs = torch.view_as_complex(rotated.float().unflatten(-1, (-1, 2)))
            rotated.copy_(torch.view_as_real(pairs.mul_(plan.rotation)).flatten(-2))
        vectors = cache.data.view(-1, cache.layout.head_dim)
        vectors[plan.written[layer]] = qkv[:, -2 * kv_heads :]

    def attention(self, qkv: Tensor, layer: int, plan: StepPlan, cache: KVCache, row_tile: int | None) -> Tensor:
        layout = cache.layout
        tiles = cache.data.view(-1, layout.block_size * layout.head_dim)  # one head of one block of one layer
        q = qkv[:, : -2 * layout.num_kv_heads]
        decode, chunk = (_decode, _chunk_attention) if row_tile is None else (_decode_in_order, _chunk_in_order)
        parts = [decode(q[g.first : g.last], tiles, layer, g, layout.head_dim) for g in plan.decodes]
        parts += [chunk(q[c.first : c.last], tiles, layer, c, layout.head_dim) for c in plan.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


# ---- products -----------------------------------------------------------------------------------------------------


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """[n, K] @ [K, M]. The slabs need each output's weights to lie side by side, as Hugging Face stores them."""
    rows, (inner, columns) = x.shape[0], weight.shape
    width = next((width for width in _SLAB_WIDTHS if columns % width == 0), 0)
    if rows not in _SLAB_ROWS or not width or weight.stride() != (1, inner):
        return torch.mm(x, weight)
    slabs = columns // width
    cut = weight.as_strided((slabs, inner, width), (width * inner, 1, inner))
    return torch.bmm(x.expand(slabs, rows, inner), cut).transpose(0, 1).reshape(rows, columns)


# ---- index tensors of a step --------------------------------------------------------------------------------------


def _written(places: list[int], cache: KVCache) -> Tensor:
    """[layers, N, 2 * kv_heads]: where each token's K and V heads go, in rows of head_dim."""
    layout = cache.layout
    size, halves = layout.block_size, 2 * layout.num_kv_heads
    place = torch.tensor(places, dtype=torch.int64)
    block = torch.div(place, size, rounding_mode="floor")
    token = block * (layout.num_layers * halves * size) + place % size
    head = torch.arange(halves) * size
    layer = torch.arange(layout.num_layers) * (halves * size)
    return layer[:, None, None] + token[None, :, None] + head


def _gather(tables: Tensor, cache: KVCache) -> Tensor:
    """Tables [rows, blocks] -> [layers, 2, rows, kv_heads, blocks], in rows of block_size * head_dim."""
    layout = cache.layout
    layers, heads = layout.num_layers, layout.num_kv_heads
    half = torch.arange(layers * 2).view(layers, 2, 1, 1, 1) * heads
    head = torch.arange(heads).view(1, 1, 1, heads, 1)
    return half + head + (tables * (layers * 2 * heads))[None, None, :, None, :]


def _visible(queries: Tensor, keys: int, window: int | None) -> Tensor:
    """Query positions [n] -> [n, keys] bool: causal, and within the sliding window if there is one."""
    position = torch.arange(keys)
    visible = position <= queries[:, None]
    return visible if window is None else visible & (position > queries[:, None] - window)


def _chunk(span: RowSpan, first: int, config: ModelConfig, cache: KVCache) -> Chunk:
    count = len(span.token_ids)
    end = span.start + count
    blocks = span.blocks[: -(-end // cache.layout.block_size)]
    window = config.sliding_window
    causal = span.start == 0 and (window is None or end <= window)
    return Chunk(
        first=first,
        last=first + count,
        start=span.start,
        gather=_gather(torch.tensor([blocks]), cache).squeeze(2),
        mask=None if causal else _visible(torch.arange(span.start, end), end, window),
    )


def _decode_groups(spans: Sequence[RowSpan], config: ModelConfig, cache: KVCache) -> list[DecodeGroup]:
    """Neighbours share a group while padding stays small: one long sequence must not slow many short ones."""
    size = cache.layout.block_size
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(spans):
        last, longest, total = first, 0, 0
        while last < len(spans):
            blocks = -(-(spans[last].start + 1) // size)
            padded = max(longest, blocks) * (last + 1 - first)
            if padded > _PADDING * (total + blocks) and padded - total - blocks > 16:
                break
            longest, total, last = max(longest, blocks), total + blocks, last + 1
        groups.append(_decode_group(spans[first:last], first, longest, config, cache))
        first = last
    return groups


def _decode_group(
    spans: Sequence[RowSpan], first: int, blocks: int, config: ModelConfig, cache: KVCache
) -> DecodeGroup:
    tables = [list(span.blocks[:blocks]) + [span.blocks[0]] * (blocks - len(span.blocks)) for span in spans]
    positions = torch.tensor([span.start for span in spans])
    visible = _visible(positions, blocks * cache.layout.block_size, config.sliding_window)
    mask = torch.zeros(visible.shape, dtype=cache.data.dtype).masked_fill_(~visible, float("-inf"))
    return DecodeGroup(first, first + len(spans), _gather(torch.tensor(tables), cache), mask[:, None, None])


# ---- attention ----------------------------------------------------------------------------------------------------


def _decode(q: Tensor, tiles: Tensor, layer: int, group: DecodeGroup, head_dim: int) -> Tensor:
    """q [D, heads, head_dim] -> [D, heads * head_dim]; the heads that share a KV head are its query rows."""
    index = group.gather[layer]
    rows, kv_heads = index.shape[1:3]
    kv = tiles.index_select(0, index.flatten()).view(2, rows, kv_heads, -1, head_dim)
    q = q.reshape(rows, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=group.mask)
    return out.reshape(rows, -1)


def _chunk_attention(q: Tensor, tiles: Tensor, layer: int, chunk: Chunk, head_dim: int) -> Tensor:
    """q [n, heads, head_dim] -> [n, heads * head_dim]."""
    index = chunk.gather[layer]
    end = chunk.start + q.shape[0]
    kv = tiles.index_select(0, index.flatten()).view(2, 1, index.shape[1], -1, head_dim)[:, :, :, :end]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        kv[0],
        kv[1],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)


def _decode_in_order(q: Tensor, tiles: Tensor, layer: int, group: DecodeGroup, head_dim: int) -> Tensor:
    rows, kv_heads = group.gather.shape[2:4]
    kv = tiles.index_select(0, group.gather[layer].flatten()).view(
        2, rows, kv_heads, group.gather.shape[4], -1, head_dim
    )
    return _in_block_order(q.reshape(rows, kv_heads, -1, head_dim), kv, group.mask)


def _chunk_in_order(q: Tensor, tiles: Tensor, layer: int, chunk: Chunk, head_dim: int) -> Tensor:
    count, kv_heads, blocks = q.shape[0], chunk.gather.shape[2], chunk.gather.shape[3]
    kv = tiles.index_select(0, chunk.gather[layer].flatten()).view(2, 1, kv_heads, blocks, -1, head_dim)
    keys = blocks * kv.shape[4]
    end = chunk.start + count
    visible = _visible(torch.arange(chunk.start, end), end, None) if chunk.mask is None else chunk.mask
    mask = torch.full((count, 1, 1, keys), float("-inf"))
    mask[:, 0, 0, :end].masked_fill_(visible, 0.0)
    kv = kv.expand(2, count, -1, -1, -1, -1)
    return _in_block_order(q.reshape(count, kv_heads, -1, head_dim), kv, mask)


def _in_block_order(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """Every query alone, one KV block after the other, with an online softmax in float32.

    q [n, kv_heads, group, head_dim], kv [2, n, kv_heads, blocks, block_size, head_dim] and mask
    [n, 1, 1, blocks * block_size]. Every product is [group, head_dim] x [head_dim, block_size] or the like, with
    operands laid out the same for chunks and decode rows: then it has the same bits. A block that a query does not
    see leaves its sums as they are, so padding and later tokens change nothing.
    """
    count, kv_heads, group, head_dim = q.shape
    size = kv.shape[4]
    scaled = (q.float() * head_dim**-0.5).view(-1, group, head_dim)
    best = torch.full((count * kv_heads, group, 1), float("-inf"))
    total = torch.zeros(count * kv_heads, group, 1)
    out = torch.zeros(count * kv_heads, group, head_dim)
    for block in range(kv.shape[3]):
        k, v = kv[:, :, :, block].float().reshape(2, -1, size, head_dim).unbind(0)
        seen = mask[..., block * size : (block + 1) * size]
        scores = torch.bmm(scaled, k.transpose(1, 2)).view(count, kv_heads, group, size).add_(seen)
        scores = scores.view(-1, group, size)
        top = torch.maximum(best, scores.amax(-1, keepdim=True))
        floor = top.clamp_min(torch.finfo(torch.float32).min)  # a query that has seen nothing yet: no NaN
        weights = torch.exp(scores - floor)
        decay = torch.exp(best - floor)
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + torch.bmm(weights, v)
        best = top
    return (out / total).view(count, -1).to(q.dtype)
