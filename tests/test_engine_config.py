"""A model directory is read in both spellings of transformers, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ModelConfig, ModelError, RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "eos_token_id": 128001,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_old_and_new_spelling_of_rope_give_the_same_config() -> None:
    old = ModelConfig.from_dict(BASE | {"rope_theta": 500000.0, "rope_scaling": LLAMA3})
    new = ModelConfig.from_dict(BASE | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}})
    assert old == new
    assert old.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (old.head_dim, old.num_kv_heads) == (128, 8)


def test_an_old_linear_scaling_is_spelled_with_type() -> None:
    config = ModelConfig.from_dict(BASE | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 4.0, 10000.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        LLAMA3 | {"rope_theta": 500000.0},
    ],
)
def test_inverse_frequencies_equal_those_of_transformers(rope: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    theirs = llama.LlamaRotaryEmbedding(LlamaConfig(rope_parameters=rope, **BASE)).inv_freq
    ours = ModelConfig.from_dict(BASE | {"rope_parameters": rope}).rope.inverse_frequencies(128)
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float32), theirs, rtol=1e-6, atol=0)


def test_end_tokens_are_those_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009], "bos_token_id": 7}))
    config = ModelConfig.from_dir(tmp_path)
    assert config.eos_token_ids == {128001, 128009}
    assert config.bos_token_id == 7


def test_mistral_honours_its_window_and_a_llama_ignores_a_stray_one() -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert ModelConfig.from_dict(mistral).sliding_window == 4096
    assert ModelConfig.from_dict(mistral | {"sliding_window": None}).sliding_window is None
    assert ModelConfig.from_dict(BASE | {"sliding_window": 4096}).sliding_window is None


def test_a_folder_without_config_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the folder is empty"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "model.gguf").touch()
    (tmp_path / "notes").mkdir()
    with pytest.raises(ModelError, match=r"has no config.json; it holds model.gguf, notes/"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        ModelConfig.from_dir(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None}, "model_type 'llama'.* is not supported"),
        ({"auto_map": {"AutoModel": "x.y"}}, "own code"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'.*llama3"),
        ({"num_key_value_heads": 5}, "32 attention heads"),
        ({"hidden_size": "4096"}, "hidden_size must be a whole number of at least 1, got '4096'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a number, got '4'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
    ],
)
def test_what_we_cannot_serve_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as error:
        ModelConfig.from_dict(BASE | change)
    assert "\n" not in str(error.value)


def test_parameters_are_counted_as_transformers_counts_them() -> None:
    assert ModelConfig.from_dict(BASE).num_parameters == 8_030_261_248


def test_a_missing_or_broken_file_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        ModelConfig.from_dict({key: value for key, value in BASE.items() if key != "hidden_size"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("wrong", [{"block_size": 8}, {"dtype": "int8"}, {"num_blocks": 0}, {"row_tile": 0}])
def test_an_engine_config_that_exists_is_in_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineConfig(**wrong)
    assert EngineConfig(block_size=64, max_model_len=100).max_blocks_per_seq == 2
