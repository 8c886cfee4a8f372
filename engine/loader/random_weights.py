"""Random weights for a Llama of any shape, the same in every process, as fast as memory can be written.

All tensors read one ring of uniformly distributed numbers, each from its own place; a prime length keeps rows of
different matrices from lining up. Drawing billions of numbers instead would take minutes for a large shape. The
numbers are made of integers by exact steps, so that processors with other vector instructions make the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from engine.config import ModelConfig
from engine.loader.cache import Progress

_RING = 4194301  # the largest prime below 2**22

# Chosen by eye so that attention picks out few of its tokens and logits have a standard deviation near 3: the
# best token then leads clearly, and it depends on the whole text.
_ATTENTION_GAIN = 2.0
_LOGIT_GAIN = 3.0


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype, progress: Progress) -> dict[str, torch.Tensor]:
    """By Hugging Face name, as a checkpoint of `config` would hold."""
    ring = torch.randint(-(1 << 15), 1 << 15, (_RING,), generator=torch.Generator().manual_seed(seed))
    ring = ring / (1 << 15) * math.sqrt(3)  # standard deviation 1
    scaled: dict[float, torch.Tensor] = {}  # few different scales: convert the ring once for each
    plan = list(_plan(config))
    tensors: dict[str, torch.Tensor] = {}
    for done, (name, shape, scale) in enumerate(plan):
        if scale is None:
            tensors[name] = torch.ones(shape, dtype=dtype)
            continue
        if scale not in scaled:
            scaled[scale] = (ring * scale).to(dtype)
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _RING
        tensors[name] = _read_ring(scaled[scale], place, shape)
        progress("generating weights", (done + 1) / len(plan))
    return tensors


def _read_ring(ring: torch.Tensor, place: int, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=ring.dtype)
    flat, written = tensor.view(-1), 0
    while written < flat.numel():
        count = min(ring.numel() - place, flat.numel() - written)
        flat[written : written + count] = ring[place : place + count]
        written, place = written + count, 0
    return tensor


def _plan(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """(name, shape, standard deviation); None for the weights of a norm, which are ones."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    keep = 1 / math.sqrt(hidden)  # keeps the variance of its input
    output = _LOGIT_GAIN * keep
    # Tied embeddings are small, so that the layers outweigh the token just read, which would repeat itself.
    yield "model.embed_tokens.weight", (config.vocab_size, hidden), output if config.tie_word_embeddings else 1.0
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,), None
        yield f"{layer}.self_attn.q_proj.weight", (query, hidden), _ATTENTION_GAIN * keep
        yield f"{layer}.self_attn.k_proj.weight", (key, hidden), keep
        yield f"{layer}.self_attn.v_proj.weight", (key, hidden), keep
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query), 1 / math.sqrt(query)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), None
        yield f"{layer}.mlp.gate_proj.weight", (intermediate, hidden), keep
        yield f"{layer}.mlp.up_proj.weight", (intermediate, hidden), keep
        yield f"{layer}.mlp.down_proj.weight", (hidden, intermediate), 1 / math.sqrt(intermediate)
    yield "model.norm.weight", (hidden,), None
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden), output
