"""What a worker tells of its requests: metrics, spans and log lines, made of the commands and events that pass.

It stands beside the core and changes nothing: everything that it knows, it has heard. A request is known from its
start to its last event here, so that each line has the client's own request id. Costs a few microseconds per step
and per request, nothing per token.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from engine.messages import (
    Cancel,
    DecodeStart,
    Failed,
    Finish,
    FirstToken,
    PrefillAccepted,
    PrefillStart,
    Reason,
    Refused,
    RequestKey,
    StageTimes,
    StepBatch,
    WorkerHello,
    WorkerLoad,
)
from wire.logs import get_logger
from wire.metrics import SHORT, STAGES, TOKENS, Reading, Series
from wire.spans import Job, trace
from wire.standing import Core, Standing
from wire.tracing import OFF, Attributes, Tracing

log = get_logger("requests")

MAX_JOBS = 65_536  # a start that the core takes for a late one has no last event
TRANSFER_REASONS = (Reason.COPY_FAILED, Reason.STALE_TICKET, Reason.SUPERSEDED, Reason.LAYOUT_MISMATCH)
# What can be expected, so that it is there with 0.
ENDS = ("stop", "length", "cancelled", "deadline", "internal", "draining")
REFUSALS = ("queue_full", "draining", "out_of_blocks", "invalid_field")


class Observer:
    def __init__(self, role: str) -> None:
        self.role = role
        self.series = Series(role)
        self.tracing: Tracing = OFF
        self._jobs: OrderedDict[tuple[int, RequestKey], Job] = OrderedDict()
        self._standing: Standing | None = None
        self._totals = Tally[str]()
        make = self.series
        self._finished = make.counters("requests_finished", "Requests that left this worker, by how.", "reason", ENDS)
        self._refused = make.counters("requests_refused", "Requests that were not taken, by why.", "reason", REFUSALS)
        self._queued = make.histogram("request_queue_time_seconds", "Waiting for this stage.", STAGES)
        self._step = make.histogram("step_seconds", "One step of the engine.", SHORT)
        self._rows = make.histogram("batch_size", "Sequences in one step.", TOKENS)
        self._tokens = make.histogram("iteration_tokens", "Tokens in one step.", TOKENS)
        if role == "prefill":
            self._prompt = make.counter("prompt_tokens", "Prompt tokens of requests that were computed here.")
            self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
            self._hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
            self._computed = make.histogram("request_prefill_time_seconds", "Computing the prompt.", STAGES)
        else:
            self._generated = make.counter("generation_tokens", "Tokens that this worker has made.")
            failures = [reason.name.lower() for reason in TRANSFER_REASONS]
            self._not_transferred = make.counters(
                "kv_transfer_failed", "Prompts not pulled, by why.", "reason", failures
            )
            self._preempted = make.counter("preemptions", "Requests that gave way for want of KV blocks.")
            self._transferred = make.histogram("kv_transfer_seconds", "From admission to the last block.", SHORT)
            self._computed = make.histogram("request_decode_time_seconds", "Computing the answer.", STAGES)

    def serving(self, core: Core, hello: WorkerHello, model: str, expired: Callable[[], int] | None = None) -> None:
        """The model is loaded: from now on its standing can be read. `expired` counts leases that ran out."""
        self._standing = Standing(self.role, core, hello, model, expired)
        self.series.registry.register(self._standing)

    @property
    def registry(self) -> CollectorRegistry:
        return self.series.registry

    @property
    def model(self) -> str:
        return self._standing.model if self._standing else ""

    def reading(self) -> Reading:
        if self._standing is None:
            return Reading(0, 0)
        load, totals = self._standing.core.load(), self._totals
        return Reading(
            load.running,
            load.waiting,
            totals["prompt"],
            totals["generated"],
            totals["cached"],
            self._standing.usage(load),
        )

    # ---- what passes ----------------------------------------------------------------------------------------------

    def commanded(self, session: int, command: Any) -> None:
        if isinstance(command, PrefillStart | DecodeStart):
            self._jobs[session, command.key] = Job(command, time.monotonic())
            if len(self._jobs) > MAX_JOBS:
                self._jobs.popitem(last=False)
            log.debug("request_started", **_name(command), tokens=len(command.token_ids))
        elif isinstance(command, Cancel):
            self._over((session, command.key), "cancelled")

    def closed(self, session: int) -> None:
        """Its requests are cancelled with it."""
        for key in [key for key in self._jobs if key[0] == session]:
            self._over(key, "cancelled")

    def said(self, session: int, event: Any) -> None:
        match event:
            case StepBatch():
                self._generated.inc(len(event.rows))
                self._totals["generated"] += len(event.rows)
                for finish in event.finishes:
                    self._finish((session, finish.key), finish)
            case FirstToken():
                self._first_token((session, event.key), event)
            case PrefillAccepted():
                self._accepted((session, event.key), event)
            case Failed():
                self._failed((session, event.key), event)
            case Refused():
                self._refused(event.reason.name.lower()).inc()
                if (job := self._jobs.pop((session, event.key), None)) is not None:
                    log.info("request_refused", **_name(job.start), reason=event.reason.name, **event.facts)

    def launched(self, rows: int, tokens: int) -> None:
        """A step was given to the engine."""
        self._rows.observe(rows)
        self._tokens.observe(tokens)

    def stepped(self, seconds: float) -> None:
        self._step.observe(seconds)

    # ---- one request ----------------------------------------------------------------------------------------------

    def _accepted(self, key: tuple[int, RequestKey], event: PrefillAccepted) -> None:
        self._queries.inc(event.ticket.num_tokens)
        self._hits.inc(event.cached_tokens)
        self._totals["cached"] += event.cached_tokens
        if (job := self._jobs.get(key)) is not None:
            job.cached = event.cached_tokens

    def _first_token(self, key: tuple[int, RequestKey], event: FirstToken) -> None:
        """From prefill the last word; from decode the sign that the request runs, with the prefill's times."""
        job, ends = self._jobs.get(key), event.finish_reason
        if self.role == "decode":
            if job is not None:
                job.running = time.monotonic()
            if ends is not None:
                self._over(key, ends.name.lower())
            return
        self._observe(event.times)
        if job is not None:
            tokens = len(job.start.token_ids)
            self._prompt.inc(tokens)
            self._totals["prompt"] += tokens
        self._over(key, "handed_over" if ends is None else ends.name.lower(), event.times)

    def _finish(self, key: tuple[int, RequestKey], finish: Finish) -> None:
        self._observe(finish.times)
        self._transferred.observe(finish.times.transferred)
        self._over(key, finish.reason.name.lower(), finish.times)

    def _observe(self, times: StageTimes) -> None:
        self._queued.observe(times.queued)
        self._computed.observe(times.computed)

    def _failed(self, key: tuple[int, RequestKey], event: Failed) -> None:
        preempted = event.reason is Reason.OUT_OF_BLOCKS and event.resumable
        if self.role == "decode":
            if preempted:
                self._preempted.inc()
            if event.reason in TRANSFER_REASONS:
                self._not_transferred(event.reason.name.lower()).inc()
        if (job := self._jobs.get(key)) is not None:
            write = log.info if preempted or event.reason is Reason.DRAINING else log.warning
            write("request_failed", **_name(job.start), reason=event.reason.name, resumable=event.resumable,
                  **event.facts)  # fmt: skip
        self._over(key, event.reason.name.lower(), error=event.reason.name)

    def _over(self, key: tuple[int, RequestKey], how: str, times: StageTimes | None = None, error: str = "") -> None:
        if (job := self._jobs.pop(key, None)) is None:
            return
        self._finished(how).inc()
        log.debug("request_ended", **_name(job.start), how=how)
        if self.tracing.on and job.start.traceparent:
            path = self._path(job.start) if isinstance(job.start, DecodeStart) else {}
            trace(self.tracing, self.role, self.model, job, how, times, error, path)

    def _path(self, start: DecodeStart) -> Attributes:
        owner = start.ticket.owner.address
        load = self._standing.core.load() if self._standing else WorkerLoad()
        known = next((path.transport for path in load.kv_paths if path.owner == owner), "")
        return {
            "pagewire.kv.owner": owner,
            "pagewire.kv.transport": known,
            "pagewire.kv.blocks": start.ticket.num_blocks,
        }


def _name(start: PrefillStart | DecodeStart) -> dict[str, object]:
    """What every line of a request has."""
    return {"request_id": start.request_id, "attempt": start.key.attempt, "key": f"{start.key.request:016x}"}
