"""From a model's name to its weights. What callers use: resolve_model, load_tensors, ModelSource, UnknownModel.

resolve_model turns any name that a user may type into a complete Hugging Face directory (a GGUF is converted once,
into a cache) and a digest of it; load_tensors gives its weights under their Hugging Face names. Importing this, and
resolving, loads no torch, so that `python -m engine.loader prepare NAME` starts at once. Never opens a pickle and
never touches the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.loader.cache import Progress, no_progress
from engine.loader.resolve import ModelSource, UnknownModel, resolve_model

if TYPE_CHECKING:
    import torch

__all__ = ["ModelSource", "Progress", "UnknownModel", "load_tensors", "resolve_model"]


def load_tensors(source: ModelSource, dtype: torch.dtype, progress: Progress = no_progress) -> dict[str, torch.Tensor]:
    """Every weight, on the CPU, as `dtype`. Those stored as `dtype` stay mapped from their files: do not write."""
    from engine.loader.weights import load  # torch, which resolving does without

    return load(source.dir, dtype, progress)
