"""Which DecodeStarts a decode worker takes on. Pure functions: a Refused with its numbers, or None.

Repeats what the router has checked, because a peer's message is validated like a client's. Whatever is refused
here holds nothing, and its ticket stays good for another worker.
"""

from __future__ import annotations

from decode_service.scheduler import DecodeScheduler
from engine.messages import DecodeStart, Reason, Refused
from kvtransfer.jobs import invalid_start
from kvtransfer.ticket import fault

MAX_RETRY_AFTER = 30.0  # seconds
STEPS_PER_PLACE = 20  # about how many steps pass until the queue moves


def refusal(
    start: DecodeStart, scheduler: DecodeScheduler, max_model_len: int, vocab_size: int, step_seconds: float
) -> Refused | None:
    """Why this start cannot be served, now (QUEUE_FULL) or ever."""
    if facts := invalid_start(start, max_model_len, vocab_size) or _invalid(start, scheduler.block_size):
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


def _invalid(start: DecodeStart, block_size: int) -> dict[str, str]:
    """What only a decode worker demands."""
    if start.params.max_tokens is not None and start.emitted + 1 >= start.params.max_tokens:
        sentence = f"{start.params.max_tokens} leave nothing to do after {start.emitted} and the prefill's one"
        return {"field": "max_tokens", "sentence": sentence}
    wrong = fault(start.ticket, len(start.token_ids), block_size)
    return {} if wrong is None else {"field": "ticket", "sentence": wrong}


def _text(**facts: int | float | str) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items()}
