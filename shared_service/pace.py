"""How much of one device prompts get beside decode steps. Sans-IO: durations and times go in, in seconds.

Where one step runs at a time (the CPU), a chunk of a prompt is a gap in everybody's stream: Chunks bounds it by time. A
card runs a chunk and decode steps side by side, decode's work first, and a prompt gets what these leave: Pace makes
them leave some. Each has one figure that trades the gaps between tokens for the time to the first one.
"""

from __future__ import annotations

import math

TURN = 1.75  # decode steps that a chunk may take: a gap with one in it is 2.75 steps long
INTERVAL = 2.7  # from one decode step's launch to the next one's, in steps that run alone, while a prompt is computed
_WEIGHT = 0.2  # of the newest decode step in their moving average


class Chunks:
    """`least` and `most` tokens of a chunk: below `least` what a chunk costs in any case would outweigh the rest."""

    def __init__(self, least: int, most: int, share: float = TURN) -> None:
        self.least, self.most = min(least, most), most
        self.share = share
        self.step_seconds = 0.0
        self.token_seconds = 0.0  # of the last chunk

    def decoded(self, seconds: float) -> None:
        self.step_seconds = _average(self.step_seconds, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.token_seconds = seconds / tokens

    def tokens(self, decoding: bool) -> int:
        """Of the next chunk, a multiple of `least` or the most; `decoding`: somebody waits for its end."""
        if not decoding:
            return self.most
        if not self.step_seconds or not self.token_seconds:  # nothing is known: careful
            return self.least
        fitting = self.share * self.step_seconds / self.token_seconds
        return self.most if fitting >= self.most else max(self.least, int(fitting) // self.least * self.least)


class Pace:
    """When the next decode step may be launched. At once, where one beside a prompt takes longer than `interval`: what
    is launched before the last one is read follows it without a break."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.interval = interval
        self.step_seconds = 0.0  # of a step that ran alone
        self._beside_seconds = 0.0  # of the last one beside a prompt
        self._launched_at = -math.inf

    def launched(self, now: float) -> None:
        self._launched_at = now

    def decoded(self, seconds: float, alone: bool) -> None:
        if alone:
            self.step_seconds = _average(self.step_seconds, seconds)
        else:  # alone it would not have taken longer: there are fewer rows now, if prompts never cease
            self.step_seconds = min(self.step_seconds, seconds)
            self._beside_seconds = seconds

    def hold(self, now: float, computing: bool) -> float:
        """Seconds to wait; `computing`: a prompt is."""
        interval = self.interval * self.step_seconds
        if not computing or self._beside_seconds >= interval:
            return 0.0
        return max(0.0, self._launched_at + interval - now)


def _average(before: float, newest: float) -> float:
    return newest if before == 0 else before + _WEIGHT * (newest - before)
