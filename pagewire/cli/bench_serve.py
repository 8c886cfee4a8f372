"""`pagewire bench serve`, from checked settings to the exit status: runs, prints, saves, plots."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.failure import CommandFailed

if TYPE_CHECKING:
    from benchmarks.serve.settings import Settings


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go, beside the table on stdout."""

    save: bool
    detailed: bool
    directory: Path | None
    filename: str | None
    plot: Path | None


@contextmanager
def refusals() -> Iterator[None]:
    """What a benchmark or the client refuses is what the user reads."""
    from benchmarks.serve.settings import BenchError
    from pagewire.answers import PagewireError

    try:
        yield
    except BenchError as error:
        raise CommandFailed(str(error), exit_code=2 if error.usage else 1) from None
    except PagewireError as error:
        raise CommandFailed(str(error)) from None


def serve(settings: Settings, output: Output) -> None:
    """Raises BenchError; and CommandFailed with status 1 if a request failed, after all is printed and saved."""
    from benchmarks.serve.plot import check_plot, plot
    from benchmarks.serve.results import figures, table
    from benchmarks.serve.run import run

    if output.plot is not None:
        check_plot(output.plot)
    facts, backend, records, seconds = asyncio.run(run(settings))
    result = figures(settings, facts, backend, records, seconds)
    print(table(settings, result, records), flush=True)
    if output.save or output.detailed or output.filename or output.directory:
        print(f"saved to {_save(result, output)}")
    if output.plot is not None:
        plot(output.plot, records, result)
        print(f"plotted to {output.plot}")
    if result["failed"]:
        raise CommandFailed(f"{result['failed']} of {len(records)} requests failed")


def _save(result: dict[str, Any], output: Output) -> Path:
    from benchmarks.serve.results import PER_REQUEST

    rate, concurrency = result["request_rate"], result["max_concurrency"]
    limit = f"-concurrency{concurrency}" if concurrency else ""
    model = result["model_id"].rsplit("/", 1)[-1].replace(":", "-")
    name = output.filename or f"{result['backend']}-{rate}qps{limit}-{model}-{result['date']}.json"
    path = (output.directory or Path()) / name
    kept = {key: value for key, value in result.items() if output.detailed or key not in PER_REQUEST}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept) + "\n", "utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}") from None
    return path
