"""The version is known once, and a source tree that is not installed has none but still runs."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from pagewire.cli.processes import child_environment
from wire.version import VERSION


def test_the_version_is_the_installed_ones() -> None:
    assert metadata.version("pagewire") == VERSION


@pytest.mark.usefixtures("not_installed")
def test_a_source_tree_that_is_not_installed_says_so() -> None:
    code = "import pagewire; from router.openai.app import VERSION; print(pagewire.__version__, VERSION)"
    env = child_environment()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "unknown unknown\n", done.stderr
