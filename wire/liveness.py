"""When a peer counts as dead: a timer over completed reads, sans-IO.

A peer is dead after `silence` seconds without a completed read. If this process itself was held up (stopped,
starved of its core), the time it lost is added: a late tick says nothing about the peer.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0  # both sides send at least this often
SILENCE_S = 3.0
TICK_S = 0.25  # how often the watcher looks


class Liveness:
    def __init__(self, now: float, silence: float = SILENCE_S, tick: float = TICK_S) -> None:
        self._silence = silence
        self._tick = tick
        self._heard_at = now
        self._ticked_at = now
        self._lag = 0.0  # seconds that this process lost since it last heard the peer

    def heard(self, now: float) -> None:
        self._heard_at = now
        self._lag = 0.0

    def alive(self, now: float) -> bool:
        """Call every `tick` seconds: a longer gap is this process's own lag."""
        self._lag += max(0.0, now - self._ticked_at - self._tick)
        self._ticked_at = now
        return now - self._heard_at <= self._silence + self._lag
