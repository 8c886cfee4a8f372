"""How far a run is: a live bar on a terminal, a line every ten seconds elsewhere. Only shows."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from benchmarks.serve.record import Record

LINE_EVERY_S = 10.0


class Progress:
    """A context. With a total of 0 it shows nothing."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._console = Console(file=stream)
        self._finished = self._failed = 0
        self._next_line = time.monotonic() + LINE_EVERY_S
        self._bar: Bar | None = None
        if total and self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, TextColumn("{task.fields[failed]}"), console=self._console)
            self._task = self._bar.add_task("", total=total, failed="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def done(self, record: Record) -> None:
        self._finished += 1
        self._failed += bool(record.error)
        failed = f"{self._failed} failed" if self._failed else ""
        if self._bar:
            self._bar.update(self._task, completed=self._finished, failed=failed)
        elif self._total and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self._console.print(f"{self._finished}/{self._total} requests {failed}".rstrip(), highlight=False)
