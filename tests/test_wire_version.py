"""The version is known once, and a source tree that is not installed has none but still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from wire.version import VERSION

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_installed_ones() -> None:
    assert metadata.version("pagewire") == VERSION


def test_a_source_tree_that_is_not_installed_says_so(tmp_path: Path) -> None:
    hidden = "import importlib.metadata as m\n_of = m.version\ndef version(name):\n    if name == 'pagewire':\n"
    (tmp_path / "sitecustomize.py").write_text(
        f"{hidden}        raise m.PackageNotFoundError(name)\n    return _of(name)\nm.version = version\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = "import pagewire; from router.openai.app import VERSION; print(pagewire.__version__, VERSION)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "unknown unknown\n", done.stderr
