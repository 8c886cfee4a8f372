"""When a token ends its request. Both stages ask here, prefill for token 0 and decode for the rest.

Standard library alone, a pure function. Stop strings are not its business: they need text, which the router has.
"""

from __future__ import annotations

from collections.abc import Set

from engine.types import FinishReason, SamplingParams


def finish_of(
    token_id: int, index: int, params: SamplingParams, eos_ids: Set[int]
) -> tuple[FinishReason | None, int | None]:
    """Why token `index` ends its request, or None, and the stop token id that matched; an end token is no such id.

    Nothing but the length ends a request before it has more than min_tokens tokens; the sampler masks the same ids
    until then.
    """
    if index >= params.min_tokens:
        if token_id in eos_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if params.max_tokens is not None and index + 1 >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None, None
