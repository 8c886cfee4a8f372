"""Progress by named phases: live bars on a terminal, one plain line per beginning and end elsewhere.

Only shows; it never decides how long anything may take.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

NAME_WIDTH = 11


class Phases:
    """A context: what is begun inside and not ended is shown as interrupted when it closes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._ended: set[str] = set()
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓[/]"),
                TextColumn(f"{{task.fields[name]:<{NAME_WIDTH}}}"),
                BarColumn(bar_width=16),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),  # last: a long path is cut at the terminal's edge
                console=console,
            )

    def __enter__(self) -> Phases:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def begin(self, name: str, note: str) -> None:
        self._started[name] = time.monotonic()
        if self._progress:
            self._tasks[name] = self._progress.add_task(note, total=None, name=name)
        else:
            self._line(name, note)

    def note(self, name: str, note: str, fraction: float | None = None) -> None:
        """What the phase does now, and how much of that is done, if it is known. Ignored once it has ended."""
        if self._progress and name not in self._ended:
            total = 1.0 if fraction is not None else None
            self._progress.update(self._tasks[name], description=note, completed=fraction or 0.0, total=total)

    def tell(self, name: str, note: str) -> None:
        """A line that stays."""
        self._line(name, note)

    def end(self, name: str, note: str) -> None:
        self._ended.add(name)
        if self._progress:
            self._progress.update(self._tasks[name], description=note, completed=1.0, total=1.0)
        else:
            self._line(name, f"{note} ({time.monotonic() - self._started[name]:.1f} s)")

    def _line(self, name: str, note: str) -> None:
        self._console.print(f"{name:<{NAME_WIDTH}} {note}", markup=False, highlight=False, soft_wrap=True)
