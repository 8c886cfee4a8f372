"""`pagewire compile`: the kernels of one model, compiled into the cache that its workers read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagewire.cli.failure import CommandFailed


def compile_for(
    model: str, dtype: str, block_size: int, archs: Sequence[str], cache_dir: Path | None, model_cache_dir: Path | None
) -> Iterator[str]:
    """A line for each architecture. Raises CommandFailed."""
    from engine.backend.compile import step_kernels
    from engine.backend.nvcc import ARCHITECTURES, DEFAULT_CACHE_DIR, KernelError, check_spills
    from engine.config import ModelConfig, ModelError
    from engine.loader import resolve_model

    known = sorted(set(ARCHITECTURES.values()))
    if unknown := [arch for arch in archs if arch not in known]:
        raise CommandFailed(f"--arch must be {' or '.join(known)}, got {unknown[0]}", exit_code=2)
    folder = cache_dir or DEFAULT_CACHE_DIR
    try:
        config = ModelConfig.from_dir(resolve_model(model, cache_dir=model_cache_dir).dir)
        for arch in archs:
            began = time.monotonic()
            kernels = dict.fromkeys(step_kernels(config, dtype, block_size, arch))
            count = check_spills(kernels, arch, folder, os.cpu_count() or 1)
            yield f"{arch}: {count} kernels in {folder}, {time.monotonic() - began:.0f} s"
    except (KernelError, ModelError, OSError, ValueError) as error:
        raise CommandFailed(str(error)) from None
