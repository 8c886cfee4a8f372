"""The weights of a complete model directory, as torch tensors: mapped from safetensors, or generated."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig, ModelError
from engine.loader.cache import Progress
from engine.loader.files import RANDOM_MARKER, read_header, weight_files
from engine.loader.random_weights import random_tensors


def load(folder: Path, dtype: torch.dtype, progress: Progress) -> dict[str, torch.Tensor]:
    """By Hugging Face name, on the CPU. A tensor stored as `dtype` is the file's pages, unread until used."""
    if (marker := folder / RANDOM_MARKER).is_file():
        seed = json.loads(marker.read_text(encoding="utf-8"))["seed"]
        return random_tensors(ModelConfig.from_dir(folder), seed, dtype, progress)
    files = weight_files(folder)
    sizes = [read_header(file).size for file in files]  # checks them, before safetensors can fail less clearly
    tensors: dict[str, torch.Tensor] = {}
    read, total = 0, sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        progress("loading weights", read / total)
        try:
            with safe_open(file, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118 (no mapping)
                    tensor = stored.get_tensor(name)
                    tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        except SafetensorError as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
        read += size
    progress("loading weights", 1.0)
    return tensors
