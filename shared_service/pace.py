"""How much of a prompt may run between two steps of those who wait for their next token. Sans-IO: durations go in.

A prompt's chunk on a shared card is a gap in everybody's stream, so it is bounded by time, not by tokens: a chunk may
take SHARE times a decode step, as both were measured last. While nobody decodes, a chunk may be as large as allowed.
Chunks have few sizes, because libraries prepare for each shape when they first meet it, which may take 0.1 s.
"""

from __future__ import annotations

SHARE = 1.6  # of a decode step: a gap with a chunk in it is 2.6 steps long, and a prompt takes 1.6 times its own time
_STEP_WEIGHT = 0.2  # of the newest decode step in their moving average
_CHUNK_WEIGHT = 0.5  # of the newest chunk: the further a prompt is, the more a token of it costs


class Pace:
    """`least` and `most` tokens of a chunk: below `least` what a chunk costs in any case would outweigh the rest."""

    def __init__(self, least: int, most: int, share: float = SHARE) -> None:
        self.sizes = _sizes(least, most)
        self.share = share
        self.step_seconds = 0.0
        self.token_seconds = 0.0

    def decoded(self, seconds: float) -> None:
        self.step_seconds = _average(self.step_seconds, seconds, _STEP_WEIGHT)

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.token_seconds = _average(self.token_seconds, seconds / max(1, tokens), _CHUNK_WEIGHT)

    def tokens(self, decoding: bool) -> int:
        """Of the next step of prompts; `decoding`: somebody waits for its end."""
        if not decoding:
            return self.sizes[-1]
        if not self.step_seconds or not self.token_seconds:  # nothing is known: careful
            return self.sizes[0]
        fitting = self.share * self.step_seconds / self.token_seconds
        return max((size for size in self.sizes if size <= fitting), default=self.sizes[0])


def _sizes(least: int, most: int) -> list[int]:
    """`least`, and from there on by a half and by a third more until `most`: 256, 384, 512, 768, ..."""
    found = []
    size = least
    while size < most:
        found += [size] + [size * 3 // 2] * (size * 3 // 2 < most)
        size *= 2
    return [*found, most]


def _average(old: float, new: float, weight: float) -> float:
    return new if old == 0 else old + weight * (new - old)
