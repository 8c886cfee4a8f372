"""The transfer benchmarks run, small: each path beside its raw peer, and steps without and with landings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvtransfer.paths import NoPath
from kvtransfer.transports import nixl


def here() -> list[str]:
    try:
        nixl.available()
    except NoPath:
        return ["memfd", "grpc"]
    return ["memfd", "nixl", "grpc"]


def said_by(module: str, *flags: str) -> str:
    """In a process of its own: a benchmark configures the logs, and its threads give way to others."""
    return subprocess.run(
        [sys.executable, "-m", module, *flags], capture_output=True, text=True, timeout=100, check=True
    ).stdout


def test_every_path_of_this_machine_is_measured_with_and_without_digests(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    sizes = ("--size", "2MiB", "--block", "128KiB", "--rounds", "1")
    said = said_by("benchmarks.transfer", *sizes, "--json", str(file))
    figures = json.loads(file.read_text("utf-8"))
    assert [(figure["path"], figure["digests"]) for figure in figures] == [
        (path, digests) for path in here() for digests in (True, False)
    ]
    for figure in figures:
        assert figure["ours"] > 0 and figure["raw"] > 0 and figure["hand_over"] > 0 and figure["warm"] > 0
        assert figure["operations"] <= 16 + 2
    assert "GB/s" in said and "hand-over" in said and "ratio" in said
    assert ("nixl" in here()) or "nixl               not here: it is not installed" in said


def test_steps_are_timed_without_and_with_landings(tmp_path: Path) -> None:
    file = tmp_path / "landings.json"
    sizes = ("--size", "1MiB", "--block", "64KiB", "--sequences", "2", "--threads", "1")
    said = said_by("benchmarks.landings", "--model", "random:tiny", "--seconds", "0.3", *sizes, "--json", str(file))
    found = json.loads(file.read_text("utf-8"))
    assert found["landings"] >= 1 and found["alone"]["p50"] > 0 and found["with_landings"]["p50"] > 0
    assert "times as long" in said
