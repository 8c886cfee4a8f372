"""What a model is, read from its Hugging Face directory, and how one engine runs it. Frozen values, no torch.

Reads config.json and generation_config.json only, in the spelling of transformers 4 (rope_theta, rope_scaling)
and of transformers 5 (rope_parameters). Never runs code that a model brings along: it refuses it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
SUPPORTED_ROPE = ("default", "linear", "llama3")
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")


class ModelError(ValueError):
    """A model directory that we cannot serve; str() is one sentence that says what to do or what is supported."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factor` and what follows it are used by the kinds that scale."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """One per pair of dimensions, [head_dim // 2]; llama3 slows only those with a long wavelength."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one model. `sliding_window` w lets a token see itself and the w - 1 before it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_parameters(self) -> int:
        """Of the weights that are kept; biases are left out."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size + 2)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def kv_block_values(self, block_size: int) -> int:
        """Elements of one KV block: K and V of `block_size` tokens in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * block_size * self.head_dim

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Raises ModelError, one sentence, when there is no config.json or we cannot serve what it describes."""
        folder = Path(path)
        file = folder / "config.json"
        if not file.is_file():
            raise ModelError(f"{folder} has no config.json; {_contents(folder)}")
        generation = folder / "generation_config.json"
        return cls.from_dict(_read_json(file), _read_json(generation) if generation.is_file() else {})

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """`config` and `generation` as in config.json and generation_config.json."""
        architecture = _check_supported(config)
        try:
            return cls._from_supported(architecture, config, generation or {})
        except KeyError as error:
            raise ModelError(f"config.json lacks {error.args[0]!r}, which a {architecture} needs") from None

    @classmethod
    def _from_supported(
        cls, architecture: str, config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        heads = _count(config, "num_attention_heads")
        max_position = _count(config, "max_position_embeddings")
        mistral = architecture == "MistralForCausalLM"
        return cls(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=_count(config, "hidden_size"),
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_count(config, "num_key_value_heads", heads),
            head_dim=_count(config, "head_dim", _count(config, "hidden_size") // heads),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=max_position,
            rope=_rope(config, max_position),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            # A Llama config may carry a stray sliding_window, which its architecture ignores.
            sliding_window=_count(config, "sliding_window", 0) or None if mistral else None,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            bos_token_id=generation.get("bos_token_id", config.get("bos_token_id")),
            eos_token_ids=_ids(config, "eos_token_id") | _ids(generation, "eos_token_id"),
        )

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary embedding, got {self.head_dim}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs. `row_tile` T is the deterministic mode: every linear runs on exactly T rows, and
    a token's bits then depend neither on its batch mates nor on the chunking. None is the fast mode.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    dtype: str = "float32"
    row_tile: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "threads"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.row_tile is not None and not 1 <= self.row_tile <= 1024:
            raise ValueError(f"row_tile must be in [1, 1024], got {self.row_tile}")

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(value).__name__}")
    return value


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"it holds {', '.join(names[:20])}{more}"


def _check_supported(config: Mapping[str, Any]) -> str:
    """The architecture's name, or ModelError."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    named = _strings(config, "architectures") or [f"(no architecture, model_type {config.get('model_type')!r})"]
    found = next((name for name in named if name in SUPPORTED_ARCHITECTURES), None)
    if found is None:
        raise ModelError(f"the architecture {', '.join(named)} is not supported; supported are {supported}")
    if config.get("auto_map"):
        raise ModelError("config.json has auto_map, which asks to run the model's own code; we never do")
    if quantization := _mapping(config, "quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"the weights are quantized ({method}), which is not supported yet; use the unquantized model")
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"the activation {activation} is not supported; a Llama uses silu")
    return found


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """KeyError when it is absent and has no default, ModelError when it is no count."""
    value = config[name] if default is None else config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json: {name} must be a number, got {value!r}")
    return float(value)


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {name} must be an object, got {value!r}")
    return value


def _strings(config: Mapping[str, Any], name: str) -> list[str]:
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ModelError(f"config.json: {name} must be a list of strings, got {value!r}")
    return value


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling of 4."""
    parameters = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in SUPPORTED_ROPE:
        raise ModelError(f"rope scaling {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("a rotary embedding over part of a head (partial_rotary_factor) is not supported")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_number(parameters, "factor", 1.0),
        low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=_number(parameters, "high_freq_factor", 4.0),
        original_max_position=_count(parameters, "original_max_position_embeddings", max_position),
    )


def _ids(config: Mapping[str, Any], name: str) -> frozenset[int]:
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ModelError(f"{name} must be a token id or a list of them, got {value!r}")
    return frozenset(ids)
