"""A small model in which everything counts that random weights leave out: gains of norms, biases, a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.loader.random_shapes import SHAPES
from engine.loader.random_weights import random_tensors

MIXED = ModelConfig.from_dict(
    {
        **SHAPES["tiny"], "vocab_size": 1024, "attention_bias": True, "mlp_bias": True, "sliding_window": 40,
        "num_attention_heads": 3, "num_key_value_heads": 1,
    },
    {"eos_token_id": [2, 0]},
)  # fmt: skip


def mixed_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """By Hugging Face name. Gains lie between a quarter and 1.75."""
    generator = torch.Generator().manual_seed(3)
    tensors = random_tensors(MIXED, 0, dtype, lambda *_: None)
    for name in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[name] = (torch.rand(tensors[name].shape, generator=generator) * 1.5 + 0.25).to(dtype)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bias = torch.randn(len(tensors[name]), generator=generator) * 0.3
        tensors[name.removesuffix("weight") + "bias"] = bias.to(dtype)
    return tensors
