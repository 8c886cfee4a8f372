"""Heartbeats of one quiet stream of KV blocks, and the verdict that it is over, whatever the transport below believes.

Either end of a Pull has one. It says nothing but heartbeats, and ends nothing but its own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from wire.liveness import HEARTBEAT_S, SILENCE_S, TICK_S, Liveness
from wire.session import Outbound

FLUSH_S = SILENCE_S  # how long a stream that we closed may take to send what was queued before


class Watch:
    """A stream is over when its peer is silent, or when its end does not get out.

    `end` has to cancel: a write to a stopped peer never returns.
    """

    def __init__(self, outbound: Outbound[Any], beat: Callable[[int], object], end: Callable[[], object]) -> None:
        self._outbound = outbound
        self._beat = beat
        self._end = end
        self._liveness = Liveness(time.monotonic())
        self._sent_at = time.monotonic()
        self._writing = False
        self.silent = False

    def heard(self) -> None:
        self._liveness.heard(time.monotonic())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around a write. While one is stuck, heartbeats do not queue up behind it."""
        self._writing = True
        yield
        self._writing = False
        self._sent_at = time.monotonic()

    async def run(self) -> None:
        sequence, closed_at = 0, None
        while True:
            now = time.monotonic()
            if not self._liveness.alive(now):
                self.silent = True
                break
            if self._outbound.closed:
                closed_at = closed_at or now
                if now - closed_at > FLUSH_S:
                    break
            elif now - self._sent_at >= HEARTBEAT_S and not self._writing:
                sequence, self._sent_at = sequence + 1, now
                self._outbound.put(self._beat(sequence))
            await asyncio.sleep(TICK_S)
        self._end()
