"""What a GGUF's metadata says, in the words of a Hugging Face config.json and generation_config.json.

Pure: metadata and tensor names in, dictionaries out. Only the Llama family, which GGUF calls `llama`, Mistral
included; anything that would change the model's answers and is not understood is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.config import ModelError, RopeConfig

SUPPORTED = ("llama",)

# How Llama 3.1 and later scale their rotary embedding; a GGUF stores the resulting factors alone.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Metadata:
    """A GGUF's keys, with one sentence for each that is missing."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values = values
        self.file = file
        self.architecture = str(values.get("general.architecture", "(none)"))
        if self.architecture not in SUPPORTED:
            raise ModelError(
                f"{file} has the architecture {self.architecture}, which is not supported; "
                f"supported are {', '.join(SUPPORTED)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """`key` below the architecture's name."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int):  # a list: the layers differ from each other
            found = "lacks" if value is None else "has a list for"
            raise ModelError(f"{self.file} {found} {self.architecture}.{key}, which must be one number")
        return value

    def token(self, kind: str) -> int | None:
        return self.values.get(f"tokenizer.ggml.{kind}_token_id")


def hf_config(
    metadata: Metadata, tensors: Mapping[str, Sequence[int]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """config.json. `tensors` maps the GGUF's names to shapes as torch has them."""
    get, need = metadata.get, metadata.need
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{metadata.file} has no token_embd.weight")
    if get("expert_count", 0):
        raise ModelError(f"{metadata.file} is a mixture of {get('expert_count')} experts, which is not supported")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    kv_heads = need("attention.head_count_kv") if get("attention.head_count_kv") is not None else heads
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ModelError(f"{metadata.file} has {key} {get(key)} and heads of {head_dim}, which is not supported")
    window = get("attention.sliding_window")
    theta = _shortest(get("rope.freq_base", 10000.0))
    return {
        "architectures": ["MistralForCausalLM" if window else "LlamaForCausalLM"],
        "model_type": "mistral" if window else "llama",
        "vocab_size": tensors["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon", 1e-5)),
        "max_position_embeddings": need("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, theta, head_dim, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
        "torch_dtype": "float32",
        **({"sliding_window": window} if window else {}),
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: every token that ends an answer, the tokenizer's own end first."""
    ends = [metadata.token(kind) for kind in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    return {"bos_token_id": metadata.token("bos"), "eos_token_id": known}


def _shortest(value: float) -> float:
    """GGUF stores float32: 1e-05 rather than 9.999999747378752e-06, which is the same float32."""
    return float(str(np.float32(value)))


def _rope_scaling(metadata: Metadata, theta: float, head_dim: int, factors: np.ndarray | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3(metadata, theta, head_dim, factors)
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind != "none":
        raise ModelError(f"{metadata.file} scales its rotary embedding by {kind!r}, which is not supported")
    return None


def _llama3(metadata: Metadata, theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The lowest frequencies are divided by the whole factor, so it is the largest; the rest must then follow."""
    factor = round(float(factors.max()), 3)
    plain = RopeConfig(theta=theta).inverse_frequencies(head_dim)
    scaled = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=_LLAMA3["low_freq_factor"],
        high_freq_factor=_LLAMA3["high_freq_factor"],
        original_max_position=int(_LLAMA3["original_max_position_embeddings"]),
    ).inverse_frequencies(head_dim)
    expected = [a / b for a, b in zip(plain, scaled, strict=True)]
    if len(expected) != len(factors) or not all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, factors.tolist(), strict=True)
    ):
        raise ModelError(f"{metadata.file} has rope_freqs that are not those of Llama 3, which is not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
