"""Models of a named shape with random weights: nothing to download, for tests, benchmarks and a first start.

Makes their directory: config.json, a tokenizer of single bytes with a chat template, and a mark in place of
weights, which engine.loader.random_weights generates at load. No torch here. The same bytes on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.loader.cache import Progress, make_once
from engine.loader.files import RANDOM_MARKER

_VERSION = 1  # raise it when anything written here, or the generator of the weights, changes
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _shape(
    *, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, theta: float, tied: bool
) -> dict[str, Any]:
    """config.json; every head has 64 dimensions, or 128 where the hidden size is large."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if hidden >= 2048 else 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


SHAPES = {
    # More heads than hidden / head_dim, and half as many for keys and values: nothing may rely on either.
    "tiny": _shape(vocab=320, hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, theta=10000.0, tied=False),
    "smollm2-135m": _shape(
        vocab=49152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, theta=100000.0, tied=True
    ),
    "llama3-8b": _shape(
        vocab=128256, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, theta=500000.0, tied=False
    ),
}


def random_dir(shape: str, cache: Path, progress: Progress) -> Path:
    """The directory of a shape in SHAPES."""
    target = cache / f"random--{shape}--v{_VERSION}"
    return make_once(target, lambda folder: _write(folder, shape), _is_complete, progress)


def _is_complete(folder: Path) -> bool:
    return (folder / RANDOM_MARKER).is_file()


def _write(folder: Path, shape: str) -> None:
    config = SHAPES[shape]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0})
    _write_json(folder / "tokenizer.json", byte_tokenizer(config["vocab_size"]))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[1],
        "eos_token": _SPECIALS[2],
        "pad_token": _SPECIALS[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / RANDOM_MARKER, {"seed": 0, "version": _VERSION})


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


# ---- the tokenizer ------------------------------------------------------------------------------------------------


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json of a BPE without merges: three specials, 256 bytes, and words that only a model can say.

    Without merges no text is ever encoded to those words; they are there so that whatever a random model of a large
    vocabulary chooses can be read: id 4711 is the text " 4711".
    """
    vocab = {text: i for i, text in enumerate(_SPECIALS)}
    for value in range(256):
        vocab[_byte_symbol(value)] = len(vocab)
    for token_id in range(len(vocab), vocab_size):
        vocab[f"{_byte_symbol(ord(' '))}{token_id}"] = token_id
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(_SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_symbol(value: int) -> str:
    """GPT-2's visible character for a byte: itself if it prints, else the next one from U+0100 on."""
    if _prints(value):
        return chr(value)
    return chr(256 + sum(not _prints(other) for other in range(value)))


def _prints(value: int) -> bool:
    return 0x21 <= value <= 0x7E or 0xA1 <= value <= 0xAC or 0xAE <= value <= 0xFF
