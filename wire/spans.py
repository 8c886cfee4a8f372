"""One request at one worker as spans: the stage, and under it what its time went to.

Made when the request is over, from the times that its last event carries. Owns nothing; knows the names and the
attributes, which follow OpenTelemetry's conventions for generative AI where these have one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.messages import DecodeStart, PrefillStart, StageTimes
from wire.tracing import Attributes, Tracing

Part = tuple[str, float, float, Attributes]


@dataclass(slots=True)
class Job:
    """What was heard of a request so far. Times are time.monotonic()'s."""

    start: PrefillStart | DecodeStart
    arrived: float
    running: float | None = None  # decode: when token 0 was echoed
    cached: int = 0  # tokens of the prefix cache


def trace(
    tracing: Tracing,
    stage: str,
    model: str,
    job: Job,
    how: str,
    times: StageTimes | None,
    error: str,
    path: Attributes,
) -> None:
    """`how` it ended, `error` if that was one, `path` how its KV blocks came."""
    now, start = time.monotonic(), job.start
    attributes: dict[str, str | int | float | bool | list[str]] = {
        "gen_ai.request.id": start.request_id,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": len(start.token_ids) - start.emitted,
        "pagewire.attempt": start.key.attempt,
        "pagewire.end": how,
    }
    if isinstance(start, PrefillStart):
        attributes["gen_ai.usage.cache_read.input_tokens"] = job.cached
        parts = _prefill_parts(job, times, now)
    else:
        attributes["pagewire.placement"] = start.key.placement
        parts = _decode_parts(job, times, now, path)
    parent = tracing.record(stage, start.traceparent, job.arrived, now, attributes, error)
    for name, began, ended, more in parts:
        tracing.record(name, parent, began, ended, more)


def _prefill_parts(job: Job, times: StageTimes | None, now: float) -> list[Part]:
    if times is None:
        return []
    split = min(now, job.arrived + times.queued)
    return [("prefill.queue", job.arrived, split, {}), ("prefill.compute", split, now, {})]


def _decode_parts(job: Job, times: StageTimes | None, now: float, path: Attributes) -> list[Part]:
    """Without times of its own, as when its client has left, the wait for a place is a part of the transfer."""
    running = now if job.running is None else job.running
    split = min(running, job.arrived + (times.queued if times else 0.0))
    parts: list[Part] = [("decode.queue", job.arrived, split, {})] if times else []
    parts.append(("kv.transfer", split, running, path))
    if job.running is not None:
        parts.append(("decode.compute", running, now, {}))
    return parts
