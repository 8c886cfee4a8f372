"""The picture of a run: TTFT over time, its distributions, and tokens per second. Needs matplotlib (extra `load`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve.record import Record
from benchmarks.serve.results import tpot
from benchmarks.serve.settings import BenchError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Before the run, and not after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot must end in {', '.join(SUFFIXES)}, got {path.name}", usage=True)
    if not path.absolute().parent.is_dir():
        raise BenchError(f"--plot: there is no folder {path.absolute().parent}", usage=True)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'pagewire[load]'", usage=True) from None


def plot(path: Path, records: Sequence[Record], result: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    good = [record for record in records if record.ok]
    start = min((record.sent for record in records), default=0.0)
    figure = Figure(figsize=(11, 7), layout="constrained")
    over_time, tokens, ttft_cdf, tpot_cdf = figure.subplots(2, 2).flat
    over_time.plot([record.sent - start for record in good], [record.ttft * 1e3 for record in good], ".", markersize=4)
    over_time.set(title="Time to first token", xlabel="sent after (s)", ylabel="ms")
    seconds: Counter[int] = Counter()
    for record in good:
        for time in record.chunk_times:
            seconds[int(time - start)] += record.output_len / len(record.chunk_times)  # type: ignore[assignment]
    places = range(max(seconds, default=0) + 1)
    tokens.bar(places, [seconds[place] for place in places], width=1.0, align="edge")
    tokens.set(title="Output tokens per second", xlabel="s", ylabel="tokens", ylim=(0, None))
    e2el = [record.latency for record in good]
    _cdf(ttft_cdf, {"TTFT": [record.ttft for record in good], "E2EL": e2el})
    _cdf(tpot_cdf, {"TPOT": [tpot(record) for record in good if record.output_len > 1]})
    figure.suptitle(
        f"{result['model_id']} by {result['backend']}: {result['completed']} of {len(records)} requests, "
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} tokens/s"
    )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror}") from None


def _cdf(axes: Any, series: dict[str, list[float]]) -> None:
    for name, values in series.items():
        ordered = sorted(values)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step([value * 1e3 for value in ordered], shares, where="post", label=name)
    axes.set(title=f"Share of requests within: {', '.join(series)}", xlabel="ms", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
