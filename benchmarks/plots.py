"""Drawings of what the benchmarks on a card measured: `python -m benchmarks.plots RESULT.json OUT.svg`, or --plot.

Bars of Pagewire beside its peer's, with the floor as a line. matplotlib is asked for only here; without it the caller
learns how to get it. Measures nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS, PEER, FLOOR = "#1f6f8b", "#c9c5ba", "#b3413b"


def steps(record: dict[str, Any], file: Path) -> None:
    """Of benchmarks.engine_gpu: decode steps by batch, one panel a shape."""
    shapes = [name for name, found in record.items() if isinstance(found, dict) and "steps" in found]
    figure, panels = _panels(len(shapes))
    for panel, name in zip(panels, shapes, strict=True):
        found = record[name]["steps"]
        _bars(
            panel, [str(one["batch"]) for one in found], [one["step_ms"] for one in found],
            [one["vllm_ms"] for one in found], [one["floor_ms"] for one in found], "vLLM 0.24",
        )  # fmt: skip
        panel.set(title=f"{name}, decode step at 1k context", xlabel="sequences", ylabel="ms")
    _save(figure, file)


def attention(record: dict[str, Any], file: Path) -> None:
    """Of benchmarks.kernels: what each shape takes, as a multiple of its floor."""
    found = [one for one in record["attention"]["shapes"] if one.get("peer_us")]
    figure, (panel,) = _panels(1, width=9)
    _bars(
        panel, [one["name"].replace(" x ", "\n") for one in found], [one["ours_us"] / one["floor_us"] for one in found],
        [one["peer_us"] / one["floor_us"] for one in found], [1.0] * len(found), "FlashInfer",
    )  # fmt: skip
    panel.set(title="paged decode attention", xlabel="sequences, context", ylabel="time / floor", yscale="log")
    _save(figure, file)


def _panels(count: int, width: float = 5) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("a drawing needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(width * count, 3.4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _save(figure: Any, file: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pagewire"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _bars(
    panel: Any, names: Sequence[str], ours: Sequence[float], peers: Sequence[float], floors: Sequence[float], peer: str
) -> None:
    for i, (name, one, other, floor) in enumerate(zip(names, ours, peers, floors, strict=True)):
        label = i == 0
        panel.bar(i - 0.2, one, 0.4, color=OURS, label="Pagewire" if label else None)
        panel.bar(i + 0.2, other, 0.4, color=PEER, label=peer if label else None)
        panel.hlines(floor, i - 0.4, i + 0.4, color=FLOOR, label="floor" if label else None)
        panel.set_xticks(range(i + 1), [*names[:i], name], fontsize=8)
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    result, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    (attention if "attention" in result else steps)(result, out)
