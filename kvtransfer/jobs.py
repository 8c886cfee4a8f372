"""What both stages need to know of a job, whatever they do with it: its key, its sense, whether it is over.

Sans-IO. Workers check again what the router has checked: a peer's number is no better than a client's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from engine.messages import DecodeStart, PrefillStart, RequestKey

JobKey = tuple[int, RequestKey]  # a worker's key for a job: the session is part of it

TOMBSTONE_TTL = 120.0
MAX_TOMBSTONES = 4096


class Tombstones:
    """Keys of jobs that are over, for a while: a start that comes late or twice must not begin again."""

    def __init__(self) -> None:
        self._until: OrderedDict[JobKey, float] = OrderedDict()

    def __contains__(self, key: JobKey) -> bool:
        return key in self._until

    def add(self, key: JobKey, now: float) -> None:
        self._until[key] = now + TOMBSTONE_TTL
        self._until.move_to_end(key)
        while len(self._until) > MAX_TOMBSTONES:
            self._until.popitem(last=False)

    def expire(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


def invalid_start(start: PrefillStart | DecodeStart, max_model_len: int, vocab_size: int) -> dict[str, str]:
    """The facts of the field that is wrong, as wire.errors wants them; empty when all are in order."""
    tokens, params = len(start.token_ids), start.params
    if params.seed is None or params.max_tokens is None:
        return {"field": "seed" if params.seed is None else "max_tokens", "sentence": "must be set"}
    if not 0 <= start.emitted < tokens:
        return {"field": "emitted", "sentence": f"{start.emitted} of {tokens} tokens leave no prompt"}
    if start.emitted >= params.max_tokens:
        sentence = f"{start.emitted} of {params.max_tokens} tokens are emitted already"
        return {"field": "max_tokens", "sentence": sentence}
    if tokens >= max_model_len:  # one place is left for the token that is sampled
        numbers = {"tokens": tokens, "limit": max_model_len, "largest": max_model_len - 1}
        return {"field": "prompt"} | {name: str(value) for name, value in numbers.items()}
    if not _inside(start.token_ids, vocab_size):
        low, high = min(start.token_ids), max(start.token_ids)
        return {"field": "token_ids", "sentence": f"{low if low < 0 else high} is not in [0, {vocab_size - 1}]"}
    return {}


def _inside(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all are in [0, vocab_size): a third of what min() and max() take."""
    try:
        return bool(np.frombuffer(array("I", ids), np.uintc).max() < vocab_size)
    except OverflowError:  # negative, or beyond 32 bits
        return False
