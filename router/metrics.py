"""What this router has done and how it stands: Prometheus series, and one log line every ten seconds of work.

Owns the registry that /metrics shows. The names follow vLLM's with the prefix pagewire_; label sets are small, and no
request id is ever a label. What can be read from the Dispatcher is read when somebody asks, never kept twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.actions import Outcome
from router.dispatch import Dispatcher
from router.policy import POLICIES
from router.workers import Role, Worker
from wire.logs import get_logger

log = get_logger("metrics")

REPORT_S = 10.0

# Seconds.
TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
STAGES = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Counts:
    """One router's: counted as requests pass."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = 0
        self.completion_tokens = 0
        self._prompts = 0
        self._ends: Tally[str] = Tally()  # choices by status code
        ProcessCollector(registry=self.registry)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._finished = self._counter("requests_finished", "Choices that ended, by how they ended.", "reason")
        self._refused = self._counter("requests_refused", "Requests that never started, by status.", "code")
        self._first = self._histogram("time_to_first_token_seconds", "From submit to the first token.", TO_FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens.", BETWEEN_TOKENS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Of one choice after its first token, per token.", BETWEEN_TOKENS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From submit to the end of a choice.", STAGES)
        self._stages = {
            "queued": self._histogram("request_queue_time_seconds", "Waiting for the prefill stage.", STAGES),
            "prefill": self._histogram("request_prefill_time_seconds", "Computing the prompt.", STAGES),
            "transfer": self._histogram("kv_transfer_seconds", "Waiting for KV blocks of another worker.", STAGES),
            "decode_queued": self._histogram(
                "request_decode_queue_time_seconds", "Waiting for the decode stage.", STAGES
            ),
            "decode": self._histogram("request_decode_time_seconds", "Computing the answer.", STAGES),
        }

    def started(self, prompt_tokens: int) -> None:
        self.requests += 1
        self._prompts += prompt_tokens
        self._prompt_tokens.inc(prompt_tokens)

    def refused(self, code: str) -> None:
        self._refused.labels(code.lower()).inc()

    def emitted(self, tokens: int, since_last: float | None) -> None:
        """Tokens that arrived together, so many seconds after those before them; None for an answer's first."""
        self._generation_tokens.inc(tokens)
        if since_last is not None:
            for _ in range(tokens):
                self._between.observe(since_last / tokens)

    def ended(self, outcome: Outcome, tokens: int, seconds: float) -> None:
        """`tokens` are those that the client was shown, `seconds` the choice's whole time."""
        self._ends[outcome.code] += 1
        self.completion_tokens += tokens
        ok = outcome.code == "OK"
        self._finished.labels(outcome.finish_reason.name.lower() if ok else outcome.code.lower()).inc()
        if outcome.code == "INTERNAL":  # the client has the same error id
            log.error("request_failed", sentence=outcome.sentence, **outcome.facts)
        if not ok:
            return
        self._queries.inc(outcome.prompt_tokens)
        self._hits.inc(outcome.cached_tokens)
        self._whole.observe(seconds)
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(outcome.times, stage))
        if (first := outcome.times.first_token) is not None:
            self._first.observe(first)
            if outcome.completion_tokens > 1:
                self._per_token.observe(max(0.0, seconds - first) / (outcome.completion_tokens - 1))

    def left(self, choices: int) -> None:
        """Choices that were still running when their client left, or when another choice of the call failed."""
        if choices:
            self._finished.labels("cancelled").inc(choices)

    async def report(self) -> None:
        """Logs until cancelled."""
        before = (0, 0)
        while True:
            await asyncio.sleep(REPORT_S)
            if (now := (self.requests, self.completion_tokens)) != before:
                rate = (now[1] - before[1]) / REPORT_S
                log.info(
                    "served",
                    requests=self.requests,
                    prompt_tokens=self._prompts,
                    completion_tokens=self.completion_tokens,
                    tokens_per_second=round(rate, 1),
                    ends=dict(self._ends),
                )
                before = now

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"pagewire_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pagewire_{name}", meaning, buckets=buckets, registry=self.registry)


class Standing:
    """A collector of what the Dispatcher knows. `absent` are addresses without a session."""

    def __init__(self, dispatcher: Dispatcher, absent: Callable[[], Mapping[tuple[Role, str], str]]) -> None:
        self._dispatcher = dispatcher
        self._absent = absent

    def collect(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        waiting = dispatcher.waiting
        yield _gauge("requests_running", "Choices on a worker.", {("router",): len(dispatcher.flows) - waiting}, "role")
        yield _gauge("requests_waiting", "Choices without a worker.", {("router",): waiting}, "role")
        yield _gauge("build_info", "Always 1.", {(metadata.version("pagewire"),): 1}, "version")
        workers = {(each.role.value, each.address): each for each in dispatcher.workers.all()}
        up: dict[tuple[str, ...], float] = {(role.value, address): 0 for role, address in self._absent()}
        up |= {key: int(worker.eligible) for key, worker in workers.items()}
        yield _gauge("worker_up", "Whether this worker takes requests.", up, "role", "worker")
        usage: dict[tuple[str, ...], float] = {
            key: _usage(worker) for key, worker in workers.items() if worker.reported
        }
        yield _gauge("kv_cache_usage_ratio", "KV blocks in use, of the worker's.", usage, "role", "worker")
        picks = CounterMetricFamily(
            "pagewire_router_picks", "Placements on a worker.", labels=("role", "policy", "worker")
        )
        for (role, address), count in dispatcher.picks.items():
            picks.add_metric((role.value, POLICIES[role], address), count)
        yield picks


def _usage(worker: Worker) -> float:
    total = max(1, worker.hello.total_blocks)
    return (total - worker.load.free_blocks) / total


def _gauge(name: str, meaning: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    family = GaugeMetricFamily(f"pagewire_{name}", meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
