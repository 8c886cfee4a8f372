"""The one-sentence text of each Reason. Workers send numbers (`facts`), this fixed table has the words.

Each reason lists its sentences from the most to the least specific; the first whose facts are all there is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.messages import Reason

SENTENCES: Mapping[Reason, Sequence[str]] = {
    Reason.OUT_OF_BLOCKS: (
        "the request needs {needed_blocks} KV blocks and the pool has {total_blocks}: at most {largest} tokens fit",
        "the KV pool ran out of blocks",
    ),
    Reason.QUEUE_FULL: (
        "{waiting} requests wait already and the queue holds {limit}: try again in {retry_after} s",
        "{waiting} requests wait already and the queue holds {limit}",
        "the queue is full",
    ),
    Reason.DRAINING: ("the worker is shutting down",),
    Reason.LAYOUT_MISMATCH: ("the two workers differ in {fields}", "the two workers differ in their KV layout"),
    Reason.STALE_TICKET: ("the prompt's KV blocks are no longer held",),
    Reason.SUPERSEDED: ("another decode worker took the request over",),
    Reason.COPY_FAILED: (
        "copying the KV blocks from {owner} failed: {cause}",
        "copying the prompt's KV blocks failed",
    ),
    Reason.DEADLINE: ("the deadline of {deadline} s passed", "the deadline passed"),
    Reason.INVALID_FIELD: (
        "the request has {tokens} tokens and the model takes {limit}: at most {largest} fit",
        "{field}: {sentence}",
        "a field of the request is out of range",
    ),
    Reason.UNIMPLEMENTED: ("{field} is not supported by this build", "a requested feature is not supported"),
    Reason.INTERNAL: (
        "an internal error ended the request (error id {error_id})",
        "an internal error ended the request",
    ),
}


def sentence(reason: Reason, facts: Mapping[str, str]) -> str:
    """One sentence for a person, with the numbers that the worker gave."""
    for template in SENTENCES[reason]:
        try:
            return template.format_map(facts)
        except KeyError:
            continue
    return SENTENCES[reason][-1]
