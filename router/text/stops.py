"""Stop strings in a stream of text, wherever the borders between its pieces fall.

Text that may be the beginning of a stop string is held back until it is known to be none, so that a client
never sees a part of one. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Passed(NamedTuple):
    """`text` may be shown; `stop` is the string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> Passed:
        """The leftmost stop string wins, of several at the same place the longest; what follows it is dropped."""
        if not self._stops:
            return Passed(text)
        buffer = self._held + text
        if found := self._find(buffer):
            start, stop = found
            self._held = ""
            return Passed(buffer[: start + len(stop)] if self._include_stop else buffer[:start], stop)
        shown = len(buffer) - self._pending(buffer)
        self._held = buffer[shown:]
        return Passed(buffer[:shown])

    def skip(self, text: str) -> str:
        """Text in which stop strings do not count (before min_tokens)."""
        text, self._held = self._held + text, ""
        return text

    def finish(self) -> str:
        """The held back text: no more will come that could complete a stop string."""
        text, self._held = self._held, ""
        return text

    def _find(self, buffer: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _pending(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-size:]) for stop in self._stops):
                return size
        return 0
