"""What an engine in this process is built from, under vLLM's names.

Every value is checked by the parser of the workers' flags, so that an argument means here what the flag means there.
An argument that is unknown, or whose feature is not built, is refused by name. Nothing here loads anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.answers import PagewireError
from wire.flags import BadOption
from wire.options import Role, WorkerOptions, parse

ROLE = Role(name="llm", service="", port=0, http_port=0, max_num_seqs=64, max_num_batched_tokens=2048)

# Our argument, which is vLLM's where it has one, and the worker's flag that it is.
_FLAGS = {
    "model": "--model",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "device": "--device",
    "kv_cache_memory_bytes": "--kv-memory",
    "download_dir": "--cache-dir",
    "row_tile": "--row-tile",
    "threads": "--threads",
}
_NAMES = {flag: name for name, flag in _FLAGS.items()}
_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other words for them

# vLLM's arguments whose feature is not built, and the value that asks for nothing. Whoever builds one deletes its row.
_UNBUILT: Mapping[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "tensor parallelism"),
    "pipeline_parallel_size": (1, "pipeline parallelism"),
    "data_parallel_size": (1, "data parallelism"),
    "quantization": (None, "quantized weights"),
    "kv_cache_dtype": ("auto", "another type for the KV cache"),
    "enable_lora": (False, "LoRA"),
    "speculative_config": (None, "speculative decoding"),
    "trust_remote_code": (False, "running a model's own code"),
    "enforce_eager": (False, "switching CUDA graphs off"),
    "enable_prefix_caching": (True, "switching the prefix cache off"),
    "enable_chunked_prefill": (True, "switching chunked prefill off"),
    "revision": (None, "choosing a revision"),
    "tokenizer_mode": ("auto", "another tokenizer mode"),
}


class EngineArgs:
    """Raises PagewireError, one sentence that names the argument.

    `tokenizer` is a directory whose tokenizer and chat template are used in place of the model's. `seed` makes the
    seeds of requests that have none. `download_dir` is where converted models are kept. `row_tile` is the
    deterministic mode and `threads` the CPU's; vLLM has neither.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: Any = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        block_size: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        device: str | None = None,
        kv_cache_memory_bytes: int | str | None = None,
        download_dir: str | os.PathLike[str] | None = None,
        row_tile: int | None = None,
        threads: int | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            _refuse(name, value)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise PagewireError("INVALID_ARGUMENT", f"seed must be a whole number, got {seed!r}", "seed")
        self.seed = seed
        self.tokenizer = None if tokenizer is None else Path(tokenizer).expanduser()
        dtype = str(dtype).removeprefix("torch.")
        given = {
            "model": os.fspath(model),
            "dtype": _DTYPES.get(dtype, dtype),
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "device": device,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "download_dir": None if download_dir is None else os.fspath(download_dir),
            "row_tile": row_tile,
            "threads": threads,
        }
        argv = [f"{_FLAGS[name]}={value}" for name, value in given.items() if value is not None]
        try:
            self.options: WorkerOptions = parse(ROLE, argv, {})
        except BadOption as error:
            sentence = in_python(str(error)).removeprefix("argument ")
            raise PagewireError("INVALID_ARGUMENT", sentence) from error


def in_python(sentence: str) -> str:
    """A sentence about a worker's flags, about our arguments."""
    return re.sub(r"--[a-z][a-z-]*", lambda found: _NAMES.get(found[0], found[0]), sentence)


def _refuse(name: str, value: Any) -> None:
    if name not in _UNBUILT:
        known = ", ".join([*list(_FLAGS)[:1], "tokenizer", "seed", *list(_FLAGS)[1:]])
        raise PagewireError("INVALID_ARGUMENT", f"{name} is no argument of the engine; it takes {known}", name)
    harmless, feature = _UNBUILT[name]
    if value != harmless:
        raise PagewireError("UNIMPLEMENTED", f"{name} is {value!r}, but {feature} is not built yet", name)
