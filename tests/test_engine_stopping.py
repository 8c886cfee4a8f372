"""Which token ends a request, and what the client is told."""

from __future__ import annotations

import pytest

from engine.stopping import finish_of
from engine.types import FinishReason, SamplingParams

EOS = frozenset((2, 9))


@pytest.mark.parametrize(
    ("token_id", "index", "params", "answer"),
    [
        (5, 0, {}, (None, None)),
        (2, 0, {}, (FinishReason.STOP, None)),
        (9, 3, {}, (FinishReason.STOP, None)),
        (2, 3, {"ignore_eos": True}, (None, None)),
        (7, 3, {"stop_token_ids": (7,)}, (FinishReason.STOP, 7)),
        (2, 3, {"stop_token_ids": (2,)}, (FinishReason.STOP, None)),
        (2, 3, {"stop_token_ids": (2,), "ignore_eos": True}, (FinishReason.STOP, 2)),
        (2, 3, {"min_tokens": 4}, (None, None)),
        (2, 4, {"min_tokens": 4}, (FinishReason.STOP, None)),
        (7, 3, {"min_tokens": 4, "stop_token_ids": (7,)}, (None, None)),
        (5, 3, {"max_tokens": 4}, (FinishReason.LENGTH, None)),
        (5, 2, {"max_tokens": 4}, (None, None)),
        (2, 3, {"max_tokens": 4}, (FinishReason.STOP, None)),
        (2, 3, {"max_tokens": 4, "min_tokens": 4}, (FinishReason.LENGTH, None)),
    ],
)
def test_a_token_ends_its_request_for_one_reason(token_id, index, params, answer):
    assert finish_of(token_id, index, SamplingParams(**params), EOS) == answer
