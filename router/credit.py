"""How far a request may run ahead of its client, in absolute token indices: at most `window` tokens unread.

Credit goes to the decode worker when half of the window is free again, so that it costs a message per half window
and not per token. A prefill's own token needs none: each attempt may add one.
"""

from __future__ import annotations


class Window:
    def __init__(self, window: int, consumed: int) -> None:
        self.window = window
        self.consumed = consumed  # the client has taken every token below
        self.granted = 0  # the decode leg may send indices below
        self._exhausted_since: float | None = None

    @property
    def due(self) -> bool:
        """Half of the window has been read since the last grant."""
        return 2 * (self.consumed + self.window - self.granted) >= self.window

    def grant(self) -> int:
        self.granted = self.consumed + self.window
        return self.granted

    def read_to(self, index: int) -> bool:
        """The client has taken every token below `index`; False if that is no news."""
        if index <= self.consumed:
            return False
        self.consumed = index
        self._exhausted_since = None
        return True

    def note(self, emitted: int, decoding: bool, now: float) -> None:
        """Starts the slow client's clock if nothing more may be sent before it reads."""
        limit = self.granted if decoding else self.consumed + self.window
        if self._exhausted_since is None and emitted >= limit:
            self._exhausted_since = now

    def exhausted_for(self, now: float) -> float:
        return 0.0 if self._exhausted_since is None else now - self._exhausted_since
