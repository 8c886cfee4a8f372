"""The Llama family: Llama 2 and 3, SmolLM2, Mistral. Owns the weights and the order of operations, nothing else.

Weights come under their Hugging Face names as [out, in] and are used as [in, out] views of that memory, so that what
is not fused stays mapped from its file. Q, K and V are one matrix, gate and up another. The rows of Q and K are
reordered so that a rotary pair is adjacent, (x0, x1), (x2, x3), ...: products of Q and K do not change by it, and a
rotation is one complex multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backend import Backend, StepPlan
from engine.config import ModelConfig, ModelError
from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    attention_norm: Tensor  # [H]
    qkv: Tensor  # [H, (heads + 2 * kv_heads) * head_dim]
    qkv_bias: Tensor | None
    out: Tensor  # [heads * head_dim, H]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [H, 2 * I]
    gate_up_bias: Tensor | None
    down: Tensor  # [I, H]
    down_bias: Tensor | None


class Llama:
    """Immutable after construction. Empties `tensors` as it goes, so that no weight is in memory twice."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        take = _taker(config, tensors)
        self.config = config
        self.embed = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)  # [V, H]
        self.layers = [_layer(config, take, f"model.layers.{i}") for i in range(config.num_layers)]
        self.norm = take("model.norm.weight", config.hidden_size)
        # [H, V]; tied weights are the embedding seen from the other side, not a copy.
        head = (
            self.embed if config.tie_word_embeddings else take("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self.head = head.t()

    def forward(self, plan: StepPlan, cache: KVCache, backend: Backend, row_tile: int | None) -> Tensor:
        """Hidden states [N, H] of the plan's tokens, before the last norm; writes their K and V into the cache."""
        config = self.config
        heads = config.num_heads + 2 * config.num_kv_heads
        x = backend.embed(self.embed, plan.token_ids)
        for index, layer in enumerate(self.layers):
            h = backend.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            qkv = backend.linear(h, layer.qkv, layer.qkv_bias, row_tile).view(-1, heads, config.head_dim)
            backend.rope_and_write(qkv, index, plan, cache)
            h = backend.attention(qkv, index, plan, cache, row_tile)
            backend.add_linear(x, h, layer.out, layer.out_bias, row_tile)
            h = backend.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            h = backend.silu_mul(backend.linear(h, layer.gate_up, layer.gate_up_bias, row_tile))
            backend.add_linear(x, h, layer.down, layer.down_bias, row_tile)
        return x

    def logits(self, hidden: Tensor, backend: Backend, row_tile: int | None) -> Tensor:
        """[R, H] -> [R, V] float32."""
        h = backend.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return backend.linear(h, self.head, None, row_tile).float()


Take = Callable[..., Tensor]


def _taker(config: ModelConfig, tensors: dict[str, Tensor]) -> Take:
    def take(name: str, *shape: int) -> Tensor:
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the weights lack {name!r}, which a {config.architecture} needs")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"the weight {name} has shape {list(tensor.shape)} and config.json asks for {list(shape)}")
        return tensor

    return take


def _layer(config: ModelConfig, take: Take, prefix: str) -> LlamaLayer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim

    def attention(kind: str, *shape: int) -> list[Tensor]:
        parts = [take(f"{prefix}.self_attn.{n}_proj.{kind}", size, *shape) for n, size in (("q", q), ("k", kv))]
        parts = [_pairs_adjacent(part, dim) for part in parts]
        return [*parts, take(f"{prefix}.self_attn.v_proj.{kind}", kv, *shape)]

    def mlp(kind: str, *shape: int) -> list[Tensor]:
        return [take(f"{prefix}.mlp.{n}_proj.{kind}", inner, *shape) for n in ("gate", "up")]

    biased, mlp_biased = config.attention_bias, config.mlp_bias
    return LlamaLayer(
        attention_norm=take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=torch.cat(attention("weight", hidden)).t(),
        qkv_bias=torch.cat(attention("bias")) if biased else None,
        out=take(f"{prefix}.self_attn.o_proj.weight", hidden, q).t(),
        out_bias=take(f"{prefix}.self_attn.o_proj.bias", hidden) if biased else None,
        mlp_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(mlp("weight", hidden)).t(),
        gate_up_bias=torch.cat(mlp("bias")) if mlp_biased else None,
        down=take(f"{prefix}.mlp.down_proj.weight", hidden, inner).t(),
        down_bias=take(f"{prefix}.mlp.down_proj.bias", hidden) if mlp_biased else None,
    )


def _pairs_adjacent(weight: Tensor, head_dim: int) -> Tensor:
    """Row i of each head's first half, then row i of its second half: Hugging Face rotates those two together."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)
