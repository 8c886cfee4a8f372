"""Every variant of the family gives transformers' logits on the same weights, whatever the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from engine.backend import RowSpan
from engine.backend.cpu import CPUBackend
from engine.config import ModelConfig, ModelError
from engine.kv_cache import KVCache, kv_layout
from engine.models.llama import Llama

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "all heads": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "own head dim": {"head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "mistral with a window": {"sliding_window": 20},
}
BLOCKS = [5, 2, 9, 0, 7]


def make(variant: str, dtype: str = "float32") -> tuple[Any, Llama, KVCache]:
    """transformers' model, ours over the same weights, and a cache."""
    torch.manual_seed(1)
    kind = MistralConfig if variant.startswith("mistral") else LlamaConfig
    theirs = kind(**(SHAPE | VARIANTS[variant]))
    peer = AutoModelForCausalLM.from_config(theirs).eval()
    if "biases" in variant:
        for name, parameter in peer.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    config = ModelConfig.from_dict(theirs.to_dict() | {"architectures": [type(peer).__name__]})
    tensors = {name: value.detach().to(getattr(torch, dtype)) for name, value in peer.state_dict().items()}
    return peer, Llama(config, tensors), KVCache(kv_layout(config, b"", dtype, 16, ""), 10)


def our_logits(model: Llama, cache: KVCache, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    backend = CPUBackend()
    table = backend.rope_table(model.config, 128)
    parts: list[torch.Tensor] = []
    start = 0
    with torch.inference_mode():
        for size in chunks:
            plan = backend.plan([RowSpan(tokens[start : start + size], start, BLOCKS)], table, model.config, cache)
            parts.append(model.logits(model.forward(plan, cache, backend, None), backend, None))
            start += size
    return torch.cat(parts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[50], [17, 20, 1, 1, 11]], ids=["whole", "chunks and single tokens"])
def test_logits_equal_those_of_transformers(variant: str, chunks: list[int]) -> None:
    peer, model, cache = make(variant)
    tokens = torch.randint(0, 96, (50,)).tolist()
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(our_logits(model, cache, tokens, chunks), expected, rtol=1e-4, atol=2e-5)


def test_bfloat16_stays_near_float32() -> None:
    peer, model, cache = make("llama", "bfloat16")
    tokens = torch.randint(0, 96, (40,)).tolist()
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0]
    found = our_logits(model, cache, tokens, [20, 19, 1])
    assert found.dtype == torch.float32
    error = (found - expected).norm() / expected.norm()
    assert error < 0.03


def test_weights_that_are_not_fused_are_not_copied() -> None:
    peer, _, _ = make("tied")
    config = ModelConfig.from_dict(peer.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    tensors = {name: value.detach() for name, value in peer.state_dict().items() if name != "lm_head.weight"}
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    model = Llama(config, tensors)
    assert model.layers[1].down.shape == (96, 64)
    assert model.layers[1].down.data_ptr() == down.data_ptr()
    assert model.head.data_ptr() == model.embed.data_ptr()
    assert tensors == {}


def test_missing_and_misshapen_weights_are_named() -> None:
    peer, model, _ = make("llama")
    tensors = dict(peer.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"lack 'model.layers.1.mlp.up_proj.weight'"):
        Llama(model.config, tensors)
    tensors = dict(peer.state_dict()) | {"model.norm.weight": torch.ones(63)}
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[63\] and config.json asks for \[64\]"):
        Llama(model.config, tensors)
