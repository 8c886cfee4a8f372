"""How much of a prompt may run between two steps of those who wait for their next token. Sans-IO: durations go in.

A prompt's chunk on a shared device is a gap in everybody's stream, so it is bounded by time, not by tokens: a chunk may
take SHARE times a decode step, as both were measured last. While nobody decodes, a chunk may be as large as allowed.
Chunks have few sizes, because libraries prepare for each shape when they first meet it.
"""

from __future__ import annotations

SHARE = (
    1.75  # of a decode step: a gap with a chunk in it is 2.75 steps long, and a prompt takes 1.57 times its own time
)
_STEP_WEIGHT = 0.2  # of the newest decode step in their moving average


class Pace:
    """`least` and `most` tokens of a chunk: below `least` what a chunk costs in any case would outweigh the rest.

    A token more costs `token_seconds`, or where that is not known its part of the last chunk: what else a chunk takes,
    for its weights and for the part of its prompt that is computed already, is in the last one's time.
    """

    def __init__(self, least: int, most: int, share: float = SHARE, token_seconds: float = 0.0) -> None:
        self.sizes = _sizes(least, most)
        self.share = share
        self.step_seconds = 0.0
        self.chunk = (0, 0.0)  # the last one's tokens and seconds
        self.token_seconds = token_seconds

    def decoded(self, seconds: float) -> None:
        before = self.step_seconds
        self.step_seconds = seconds if before == 0 else before + _STEP_WEIGHT * (seconds - before)

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.chunk = (tokens, seconds)

    def tokens(self, decoding: bool) -> int:
        """Of the next step of prompts; `decoding`: somebody waits for its end."""
        if not decoding:
            return self.sizes[-1]
        count, seconds = self.chunk
        if not self.step_seconds or not count:  # nothing is known: careful
            return self.sizes[0]
        spare = self.share * self.step_seconds - seconds
        fitting = count + spare / (self.token_seconds or seconds / count)
        return max((size for size in self.sizes if size <= fitting), default=self.sizes[0])


def _sizes(least: int, most: int) -> list[int]:
    """From `least` on, a quarter of it apart until four times as much, then half of it: 256, 320, ... 1024, 1152."""
    found, size = [], least
    while size < most:
        found.append(size)
        size += max(1, least // 2 if size >= 4 * least else least // 4)
    return [*found, most]
