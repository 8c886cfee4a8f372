"""These tests build an image and start a Docker engine: they run by `make test-containers`, not with the others."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True leaves a file out; None says nothing, so that -m and the file's name decide."""
    return None if config.option.markexpr == "containers" else True
