"""A .gguf file, dequantized once into a Hugging Face directory of float32 safetensors in the cache.

The `gguf` package reads and dequantizes; transformers writes the tokenizer meanwhile, in a child process, because
it takes seconds to import and gigabytes to keep. Tensors are written one at a time: memory stays small.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from engine.config import ModelError
from engine.loader.cache import Progress, make_once
from engine.loader.files import read_header
from engine.loader.gguf_config import Metadata, generation_config, hf_config
from engine.loader.gguf_tokenizer import TokenizerChild

_VERSION = 1  # raise it when a directory written by an older version must not be used any more
_HEAD, _TAIL = 16 << 20, 1 << 20  # what of a .gguf file names its directory, besides its size
_WEIGHTS = "model.safetensors"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # goes into config.json


class _Source(NamedTuple):
    """One tensor to write: `heads` is not 0 where GGUF stores the rows of each head in its own order."""

    name: str
    tensor: Any  # gguf.ReaderTensor
    shape: tuple[int, ...]
    heads: int


def converted(file: Path, cache: Path, progress: Progress) -> Path:
    """The Hugging Face directory of `file`, made if it is not in `cache` yet. ModelError, one sentence."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_VERSION} {size} ".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_HEAD))
        stream.seek(max(0, size - _TAIL))
        digest.update(stream.read(_TAIL))
    target = cache / f"gguf--{re.sub(r'[^A-Za-z0-9._-]', '_', file.stem)}--{digest.hexdigest()[:16]}"
    return make_once(target, lambda folder: _convert(file, folder, progress), _is_intact, progress)


def _is_intact(folder: Path) -> bool:
    """A power failure may cut off a file that was renamed into place in time."""
    try:
        read_header(folder / _WEIGHTS)
    except (ModelError, OSError):
        return False
    return (folder / "config.json").is_file()


def _convert(file: Path, folder: Path, progress: Progress) -> None:
    progress("reading the GGUF", 0.0)
    with TokenizerChild(file, folder) as tokenizer:  # its import takes longest, so it starts first
        metadata, sources, config = _read(file)
        _write_weights(sources, folder / _WEIGHTS, progress)
        progress("writing the tokenizer", 0.0)
        tokenizer.finish(metadata)
        progress("writing the tokenizer", 1.0)
    (folder / "generation_config.json").write_text(json.dumps(generation_config(metadata), indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _read(file: Path) -> tuple[Metadata, list[_Source], dict[str, Any]]:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file} is not a GGUF file")
    try:
        reader = gguf.GGUFReader(file)
        # The token lists are large and transformers reads them itself.
        values = {key: field.contents() for key, field in reader.fields.items() if len(field.data) < 1024}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is truncated or not a valid GGUF file: {error}") from None
    metadata = Metadata(values, file.name)
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    config = hf_config(metadata, shapes, factors)
    sources = [_source(tensor, shapes, config) for tensor in reader.tensors if tensor.name != _ROPE_FACTORS]
    _check_complete(file, sources, config)
    return metadata, sources, config


def _source(tensor: Any, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> _Source:
    if tensor.tensor_type not in _readable_types():
        raise ModelError(f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be dequantized")
    stem, _, kind = tensor.name.rpartition(".")
    heads = 0
    if stem in _TOP and kind == "weight":
        name = _TOP[stem]
    elif (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and match[2] in _LAYER and kind in ("weight", "bias"):
        name = f"model.layers.{match[1]}.{_LAYER[match[2]]}"
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(match[2], 0)
    else:
        raise ModelError(f"the tensor {tensor.name} is not one of a Llama, so this model is not supported")
    return _Source(f"{name}.{kind}", tensor, shapes[tensor.name], heads)


def _readable_types() -> set[gguf.GGMLQuantizationType]:
    return {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, *gguf.quants._type_traits}


def _check_complete(file: Path, sources: list[_Source], config: dict[str, Any]) -> None:
    have = {source.name for source in sources}
    layers = range(config["num_hidden_layers"])
    need = [f"model.layers.{i}.{name}.weight" for i in layers for name in _LAYER.values()]
    missing = [name for name in ["model.embed_tokens.weight", "model.norm.weight", *need] if name not in have]
    if missing:
        raise ModelError(f"{file.name} lacks {len(missing)} tensors of a Llama, the first is {missing[0]}")


# ---- weights ------------------------------------------------------------------------------------------------------


def _write_weights(sources: list[_Source], target: Path, progress: Progress) -> None:
    """A safetensors file: header length, JSON header, tensors in the header's order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in sources:
        start, end = end, end + 4 * int(np.prod(source.shape))
        entries[source.name] = {"dtype": "F32", "shape": source.shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if (free := shutil.disk_usage(target.parent).free) < end:
        raise ModelError(f"the converted model needs {end} bytes in {target.parent.parent}, where {free} are free")
    with target.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        written = 0
        for values in _dequantized(sources):
            stream.write(values.data)
            written += values.nbytes
            progress("dequantizing", written / end)


def _dequantized(sources: list[_Source]) -> Iterator[np.ndarray]:
    for source in sources:
        values = gguf.quants.dequantize(source.tensor.data, source.tensor.tensor_type)
        values = values.reshape(source.shape).astype(np.float32, copy=False)
        yield np.ascontiguousarray(_halves_apart(values, source.heads) if source.heads else values)


def _halves_apart(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the halves of a head's rotary dimensions (0, d/2, 1, d/2 + 1, ...); Hugging Face does not."""
    head_dim, rest = values.shape[0] // heads, values.shape[1:]
    return values.reshape(heads, head_dim // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)
