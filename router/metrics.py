"""What this router has done and how it stands, as Prometheus series and as the line each ten seconds of work.

Counts is told as requests pass; what can be read from the Dispatcher is read when somebody asks, never kept twice.
Names, buckets and the line itself are wire.metrics'. No request id is ever a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric

from engine.messages import Reason
from router.actions import Outcome
from router.dispatch import Dispatcher
from router.policy import POLICIES
from router.workers import Role, Worker
from wire.logs import get_logger
from wire.metrics import BETWEEN_TOKENS, STAGES, TO_FIRST_TOKEN, TOKENS, Reading, Series, Values, gauge, total

log = get_logger("metrics")

ROLE = "router"
# What can be expected, so that it is there with 0.
ENDS = ("stop", "length", "cancelled", "deadline_exceeded", "unavailable", "resource_exhausted", "internal")
REFUSALS = ("invalid_argument", "resource_exhausted", "unavailable", "not_found", "unimplemented")


class Counts:
    """One router's: counted as requests pass."""

    def __init__(self) -> None:
        self.series = make = Series(ROLE)
        self.registry = make.registry
        self.requests = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = make.counter("generation_tokens", "Generated tokens.")
        self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._finished = make.counters("requests_finished", "Choices that ended, by how.", "reason", ENDS)
        self._refused = make.counters("requests_refused", "Requests that never started, by status.", "code", REFUSALS)
        self._prompt_sizes = make.histogram("request_prompt_tokens", "Of one request.", TOKENS)
        self._answer_sizes = make.histogram("request_generation_tokens", "Of one choice.", TOKENS)
        self._first = make.histogram("time_to_first_token_seconds", "From submit to the first token.", TO_FIRST_TOKEN)
        self._between = make.histogram("inter_token_latency_seconds", "Between two tokens.", BETWEEN_TOKENS)
        self._per_token = make.histogram(
            "request_time_per_output_token_seconds", "Of one choice after its first token, per token.", BETWEEN_TOKENS
        )
        self._whole = make.histogram("e2e_request_latency_seconds", "From submit to the end of a choice.", STAGES)
        self._stages = {
            "queued": make.histogram("request_queue_time_seconds", "Waiting for the prefill stage.", STAGES),
            "prefill": make.histogram("request_prefill_time_seconds", "Computing the prompt.", STAGES),
            "transfer": make.histogram("kv_transfer_seconds", "Waiting for KV blocks of another worker.", STAGES),
            "decode_queued": make.histogram(
                "request_decode_queue_time_seconds", "Waiting for the decode stage.", STAGES
            ),
            "decode": make.histogram("request_decode_time_seconds", "Computing the answer.", STAGES),
        }

    def started(self, prompt_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_sizes.observe(prompt_tokens)

    def refused(self, code: str) -> None:
        self._refused(code.lower()).inc()

    def first_token(self, seconds: float) -> None:
        """Of a choice, when it comes and not when the choice ends: what is slow now is seen now."""
        self._first.observe(seconds)

    def emitted(self, tokens: int, since_last: float | None) -> None:
        """Tokens that arrived together, so many seconds after those before them; None for an answer's first."""
        self.generation_tokens += tokens
        self._generation_tokens.inc(tokens)
        if since_last is not None:
            self._between.observe(since_last / tokens, tokens)

    def ended(self, outcome: Outcome, tokens: int, seconds: float) -> None:
        """`tokens` are those that the client was shown, `seconds` the choice's whole time."""
        ok = outcome.code == "OK"
        how = outcome.finish_reason.name.lower() if ok else outcome.code.lower()
        self._finished(how).inc()
        if outcome.code == "INTERNAL":  # the client has the same error id
            log.error("request_failed", sentence=outcome.sentence, **outcome.facts)
        else:
            (log.debug if ok else log.info)("request_ended", how=how, tokens=tokens, seconds=round(seconds, 3))
        if not ok:
            return
        self.cached_tokens += outcome.cached_tokens
        self._queries.inc(outcome.prompt_tokens)
        self._hits.inc(outcome.cached_tokens)
        self._answer_sizes.observe(tokens)
        self._whole.observe(seconds)
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(outcome.times, stage))
        if (first := outcome.times.first_token) is not None and outcome.completion_tokens > 1:
            self._per_token.observe(max(0.0, seconds - first) / (outcome.completion_tokens - 1))

    def left(self, choices: int) -> None:
        """Choices that were still running when their client left, or when another choice of the call failed."""
        if choices:
            self._finished("cancelled").inc(choices)


class Standing:
    """A collector of what the Dispatcher knows. `absent` are addresses without a session."""

    def __init__(
        self, dispatcher: Dispatcher, counts: Counts, absent: Callable[[], Mapping[tuple[Role, str], str]]
    ) -> None:
        self._dispatcher = dispatcher
        self._counts = counts
        self._absent = absent

    def reading(self) -> Reading:
        counts, waiting = self._counts, self._dispatcher.waiting
        return Reading(
            running=len(self._dispatcher.flows) - waiting,
            waiting=waiting,
            prompt_tokens=counts.prompt_tokens,
            generation_tokens=counts.generation_tokens,
            cached_tokens=counts.cached_tokens,
            kv_use=self._usage(),
        )

    def collect(self) -> Iterator[Metric]:
        dispatcher, waiting = self._dispatcher, self._dispatcher.waiting
        running = len(dispatcher.flows) - waiting
        yield gauge("requests_running", "Choices on a worker.", {(ROLE,): running}, "role")
        yield gauge("requests_waiting", "Choices without a worker.", {(ROLE,): waiting}, "role")
        yield gauge("kv_cache_usage_ratio", "KV blocks in use, of all workers'.", {(ROLE,): self._usage()}, "role")
        yield from self._workers()
        picks: Values = {(r.value, POLICIES[r], address): count for (r, address), count in dispatcher.picks.items()}
        yield total("router_picks", "Placements on a worker.", picks, "role", "policy", "worker")
        setbacks: Values = {(r.value, why.name.lower()): dispatcher.setbacks[r, why] for r in Role for why in Reason}
        yield total(
            "router_setbacks", "What workers refused or failed; the request tries again.", setbacks, "role", "reason"
        )
        lost: Values = {(role.value,): dispatcher.lost[role] for role in Role}
        yield total("router_sessions_lost", "Sessions to workers that ended.", lost, "role")

    def _workers(self) -> Iterator[Metric]:
        """As this router sees them; their own ports say more."""
        workers = {(each.role.value, each.address): each for each in self._dispatcher.workers.all()}
        up: dict[tuple[str, ...], float] = {(role.value, address): 0 for role, address in self._absent()}
        up |= {key: int(worker.eligible) for key, worker in workers.items()}
        yield gauge("worker_up", "Whether this worker takes requests.", up, "role", "worker")
        heard = {key: worker for key, worker in workers.items() if worker.reported}
        usage: Values = {key: _used(worker) / _blocks(worker) for key, worker in heard.items()}
        yield gauge("worker_kv_cache_usage_ratio", "KV blocks in use, of the worker's.", usage, "role", "worker")

    def _usage(self) -> float:
        workers = [worker for worker in self._dispatcher.workers.all() if worker.reported]
        return sum(map(_used, workers)) / max(1, sum(map(_blocks, workers)))


def _blocks(worker: Worker) -> int:
    return max(1, worker.hello.total_blocks)


def _used(worker: Worker) -> int:
    return _blocks(worker) - worker.load.free_blocks
