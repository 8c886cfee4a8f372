"""Which DecodeStarts a decode worker takes on. Pure functions: a Refused with its numbers, or None.

Repeats what the router has checked, because a peer's message is validated like a client's. Whatever is refused
here holds nothing, and its ticket stays good for another worker.
"""

from __future__ import annotations

from decode_service.scheduler import DecodeScheduler
from engine.config import EngineConfig
from engine.messages import DecodeStart, Reason, Refused
from kvtransfer.ticket import fault

MAX_RETRY_AFTER = 30.0  # seconds
STEPS_PER_PLACE = 20  # about how many steps pass until the queue moves


def refusal(
    start: DecodeStart, scheduler: DecodeScheduler, config: EngineConfig, step_seconds: float
) -> Refused | None:
    """Why this start cannot be served, now (QUEUE_FULL) or ever."""
    if facts := _invalid(start, scheduler.block_size, config.max_model_len):
        return Refused(start.key, Reason.INVALID_FIELD, facts=facts)
    tokens, total = len(start.token_ids), scheduler.pool.num_blocks
    if (needed := scheduler.blocks_for(tokens + 1)) > total:
        largest = total * scheduler.block_size - 1
        facts = _text(needed_blocks=needed, total_blocks=total, tokens=tokens, largest=largest)
        return Refused(start.key, Reason.OUT_OF_BLOCKS, facts=facts)
    if scheduler.full:
        retry_after = round(min(MAX_RETRY_AFTER, max(0.1, STEPS_PER_PLACE * step_seconds)), 1)
        facts = _text(waiting=len(scheduler.waiting), limit=scheduler.max_waiting, retry_after=retry_after)
        return Refused(start.key, Reason.QUEUE_FULL, retry_after, facts)
    return None


def _invalid(start: DecodeStart, block_size: int, max_model_len: int) -> dict[str, str]:
    """The facts of an invalid field; empty when all are in order."""
    tokens, params = len(start.token_ids), start.params
    if params.seed is None or params.max_tokens is None:
        return _text(field="seed" if params.seed is None else "max_tokens", sentence="it must be set")
    if not 0 <= start.emitted < tokens:
        return _text(field="emitted", sentence=f"it must be in [0, {tokens - 1}], got {start.emitted}")
    if start.emitted + 1 >= params.max_tokens:
        sentence = f"{params.max_tokens} leave nothing to do here after {start.emitted} and the prefill's one"
        return _text(field="max_tokens", sentence=sentence)
    if tokens >= max_model_len:  # one place is left for the token that is sampled
        return _text(field="token_ids", tokens=tokens, limit=max_model_len, largest=max_model_len - 1)
    wrong = fault(start.ticket, tokens, block_size)
    return {} if wrong is None else _text(field="ticket", sentence=wrong)


def _text(**facts: int | float | str) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items()}
