"""What a model asks of a device, and the index tensors of one step that every operation reads.

A backend keeps no state: weights, cache and plan are arguments. `cpu.py` is the specification that every other
backend must agree with; the shapes below are the contract. N tokens, R sampled rows, D decode rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # compiling kernels, which is a module of this package, needs no torch
    from torch import Tensor

    from engine.config import ModelConfig
    from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence: `first` .. `last` in the step's tokens, positions from `start`."""

    first: int
    last: int
    start: int
    gather: Tensor  # [layers, 2, kv_heads, blocks]: rows of the cache seen as [-1, block_size * head_dim]
    mask: Tensor | None  # [tokens, positions] bool, True is visible; None means causal from position 0


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One new token each of `last - first` sequences of similar length."""

    first: int
    last: int
    gather: Tensor  # [layers, 2, rows, kv_heads, blocks]; short tables repeat a block of their own
    mask: Tensor  # [rows, 1, 1, positions] of the cache's dtype, 0 or -inf


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decode rows come first, chunks after them. Everything that layers share is computed once, here."""

    token_ids: Tensor  # [N] int64
    rotation: Tensor  # [N, 1, head_dim / 2] complex64: cos + i sin of each token's position
    written: Tensor  # [layers, N, 2 * kv_heads]: rows of the cache seen as [-1, head_dim]
    decodes: Sequence[DecodeGroup]
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of a batch as a plan needs it: new tokens from `start`, and the blocks that cover them."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]


class Backend(Protocol):
    """The operations of a decoder layer. Those named in-place change their first argument."""

    def rope_table(self, config: ModelConfig, positions: int) -> Tensor:
        """[positions, head_dim / 2] complex64."""

    def plan(self, spans: Sequence[RowSpan], table: Tensor, config: ModelConfig, cache: KVCache) -> StepPlan:
        """`spans`: those with one token first."""

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """[V, H], [N] -> [N, H], a new tensor."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[N, H], [H] -> [N, H]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, row_tile: int | None) -> Tensor:
        """[N, K], [K, M], [M] -> [N, M]. With a row tile, every product runs on exactly that many rows."""

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, row_tile: int | None
    ) -> Tensor:
        """In place: residual [N, M] += linear(x). Returns it."""

    def rope_and_write(self, qkv: Tensor, layer: int, plan: StepPlan, cache: KVCache) -> None:
        """In place: rotates the Q and K heads of qkv [N, heads + 2 * kv_heads, head_dim], writes K and V to blocks."""

    def attention(self, qkv: Tensor, layer: int, plan: StepPlan, cache: KVCache, row_tile: int | None) -> Tensor:
        """Attends through block tables: [N, heads + 2 * kv_heads, head_dim] -> [N, heads * head_dim]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * I] -> [N, I]: silu of the first half times the second. May overwrite its argument."""
