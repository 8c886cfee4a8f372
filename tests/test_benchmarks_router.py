"""The router's benchmark runs, and what it says of a few streams is what they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.router import rate

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(120)
def test_a_short_run_at_both_doors_completes_every_stream_and_finds_who_left(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.router", "--seconds", "1", "--parts", "left,grpc,http"]
    done = subprocess.run(
        [*argv, "--json", str(tmp_path / "router.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "router.json").read_text("utf-8"))
    assert results["left"]["cancelled"] == results["left"]["streams"]
    for door, streams in (("grpc", 250), ("http", 125)):
        part = results[door]
        assert part["complete"] == part["streams"] == streams and part["tokens"] == 32 * streams
        assert part["chunks"] <= part["tokens"] and part["held_ms_p50"] > 0
        assert 0 < part["tokens_per_s"] < 64 * streams  # at 32 tokens a second of each


def test_streams_that_overlap_for_a_moment_between_two_tokens_have_a_rate() -> None:
    early = {"began": 0.0, "ended": 1.0, "news": [(0.5, 20), (0.9, 12)]}
    late = {"began": 0.99, "ended": 2.0, "news": [(1.5, 20), (1.9, 12)]}
    assert rate([early, late]) == 32.0
    assert rate([early, {**early, "began": 0.4}]) == pytest.approx(64 / 0.6)
