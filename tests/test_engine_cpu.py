"""The CPU backend's operations against the plainest possible arithmetic, and what must not poison them."""

from __future__ import annotations

import pytest
import torch

from engine.backend import RowSpan, StepPlan
from engine.backend.cpu import CPUBackend
from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import KVCache, kv_layout

CPU = CPUBackend()
HEADS, KV_HEADS, DIM, SIZE = 6, 2, 16, 16


def make(window: int | None = None, num_blocks: int = 40) -> tuple[ModelConfig, KVCache]:
    config = ModelConfig(
        "MistralForCausalLM", 50, 96, 128, 3, HEADS, KV_HEADS, DIM, 1e-5, 1024, RopeConfig(), sliding_window=window
    )
    return config, KVCache(kv_layout(config, b"", "float32", SIZE, ""), num_blocks)


def plan_of(config: ModelConfig, cache: KVCache, spans: list[RowSpan]) -> StepPlan:
    return CPU.plan(spans, CPU.rope_table(config, 1024), config, cache)


def naive_attention(q: torch.Tensor, cache: KVCache, layer: int, span: RowSpan, window: int | None) -> torch.Tensor:
    """One query and one head at a time, over K and V collected position by position."""
    out = torch.zeros(len(span.token_ids), HEADS, DIM)
    for row in range(len(span.token_ids)):
        last = span.start + row
        seen = [p for p in range(last + 1) if window is None or p > last - window]
        for head in range(HEADS):
            where = [(span.blocks[p // SIZE], p % SIZE) for p in seen]
            k, v = (
                torch.stack([cache.data[block, layer, half, head // 3, offset] for block, offset in where])
                for half in (0, 1)
            )
            out[row, head] = torch.softmax(k @ q[row, head] * DIM**-0.5, 0) @ v
    return out.flatten(1)


SPANS = [
    RowSpan([1], 0, [3]),
    RowSpan([2], 15, [9]),
    RowSpan([3], 16, [4, 7]),
    RowSpan([4], 299, list(range(19, 38))),
    RowSpan([5] * 5, 0, [1]),
    RowSpan([6] * 20, 13, [0, 2, 5]),
]


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("row_tile", [None, 4], ids=["fast", "deterministic"])
def test_attention_through_block_tables_equals_one_query_at_a_time(window: int | None, row_tile: int | None) -> None:
    torch.manual_seed(0)
    config, cache = make(window)
    cache.data.normal_()
    plan = plan_of(config, cache, SPANS)
    qkv = torch.randn(len(plan.token_ids), HEADS + 2 * KV_HEADS, DIM)
    found = CPU.attention(qkv, 1, plan, cache, row_tile)
    first = 0
    for span in SPANS:
        last = first + len(span.token_ids)
        expected = naive_attention(qkv[first:last, :HEADS], cache, 1, span, window)
        torch.testing.assert_close(found[first:last], expected, rtol=1e-4, atol=1e-5)
        first = last


@pytest.mark.parametrize("row_tile", [None, 4], ids=["fast", "deterministic"])
def test_finite_bytes_left_in_a_tail_change_no_bit(row_tile: int | None) -> None:
    torch.manual_seed(0)
    config, cache = make()
    cache.data.normal_()
    plan = plan_of(config, cache, SPANS)
    qkv = torch.randn(len(plan.token_ids), HEADS + 2 * KV_HEADS, DIM)
    before = CPU.attention(qkv, 2, plan, cache, row_tile)
    for span in SPANS:
        end = span.start + len(span.token_ids)
        cache.data[span.blocks[-1], :, :, :, (end - 1) % SIZE + 1 :] = 3e30
    assert torch.equal(CPU.attention(qkv, 2, plan, cache, row_tile), before)


def test_one_long_sequence_does_not_pad_many_short_ones() -> None:
    config, cache = make(num_blocks=300)
    spans = [RowSpan([1], 30, [i, i + 1]) for i in range(8)] + [RowSpan([1], 1000, list(range(63)))]
    groups = plan_of(config, cache, spans).decodes
    assert [(group.first, group.last) for group in groups] == [(0, 8), (8, 9)]
    assert groups[0].mask.shape[-1] == 32


def test_k_and_v_are_written_where_the_table_says_and_nowhere_else() -> None:
    torch.manual_seed(0)
    config, cache = make()
    span = RowSpan([1, 2, 3], 15, [6, 11])
    plan = plan_of(config, cache, [span])
    qkv = torch.randn(3, HEADS + 2 * KV_HEADS, DIM)
    before = qkv.clone()
    CPU.rope_and_write(qkv, 1, plan, cache)
    for row, (block, offset) in enumerate([(6, 15), (11, 0), (11, 1)]):
        pairs = torch.view_as_complex(before[row, :-KV_HEADS].unflatten(-1, (-1, 2)).contiguous())
        angle = (15 + row) * torch.tensor(config.rope.inverse_frequencies(DIM))
        rotated = torch.view_as_real(pairs * torch.polar(torch.ones(DIM // 2), angle)).flatten(-2)
        torch.testing.assert_close(qkv[row, :-KV_HEADS], rotated)
        assert torch.equal(cache.data[block, 1, 0, :, offset], qkv[row, HEADS:-KV_HEADS])
        assert torch.equal(cache.data[block, 1, 1, :, offset], before[row, -KV_HEADS:])
    assert cache.data.count_nonzero() == 3 * 2 * KV_HEADS * DIM


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 15, 16, 40])
@pytest.mark.parametrize("columns", [96, 70, 192])
@pytest.mark.parametrize("row_tile", [None, 1, 8])
def test_linear_is_the_product_whatever_the_rows_and_the_tile(rows: int, columns: int, row_tile: int | None) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(columns, 64), torch.randn(columns), torch.randn(rows, 64)
    residual = torch.randn(rows, columns)
    for stored in (weight.t(), weight.t().contiguous()):
        expected = x @ weight.t() + bias
        torch.testing.assert_close(CPU.linear(x, stored, bias, row_tile), expected, rtol=1e-4, atol=1e-4)
        for one in (None, bias):
            target = residual.clone()
            added = CPU.add_linear(target, x, stored, one, row_tile)
            assert added is target
            expected = residual + x @ weight.t() + (0 if one is None else one)
            torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)


def test_rms_norm_and_silu_mul_are_their_formulas() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(CPU.rms_norm(x, weight, 1e-5), expected)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(CPU.silu_mul(x.clone()), gate * torch.sigmoid(gate) * up)
