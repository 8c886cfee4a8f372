"""What every process's /metrics has in common: one registry, names and buckets, vLLM's names, the line each 10 s.

Names follow vLLM's with the prefix pagewire_, and every series says whose it is by its `role`. Label sets are small;
no request id is ever a label. Knows no request and measures nothing itself.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from wire.version import VERSION

disable_created_metrics()  # a second series for each, which no dashboard asks for

PREFIX = "pagewire_"
REPORT_S = 10.0

# Seconds.
TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
STAGES = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
# A transfer or a step may take less than a millisecond.
SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# Our names, without prefix and _total, and those under which vLLM's users know the same; where there are two, older
# dashboards ask for the second.
VLLM: Mapping[str, Sequence[str]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "cache_config_info": ("cache_config_info",),
    "preemptions": ("num_preemptions",),
    "requests_finished": ("request_success",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "iteration_tokens": ("iteration_tokens_total",),
    **{
        name: (name,)
        for name in (
            "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_prompt_tokens",
            "time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
            "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        )
    },
}  # fmt: skip
_VLLM_LABELS = {"reason": "finished_reason", "num_blocks": "num_gpu_blocks"}
_SUCCESS = frozenset({"stop", "length"})  # the reasons that vLLM counts as success


class Series:
    """The registry of one process, and how its series are made."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Built(role))

    def counter(self, name: str, meaning: str) -> Counter:
        return Counter(PREFIX + name, meaning, ("role",), registry=self.registry).labels(self.role)

    def counters(self, name: str, meaning: str, label: str, known: Iterable[str] = ()) -> Callable[[str], Counter]:
        """One counter for each value of the label. The known ones are there from the start, with 0: what appears
        with its first 1 has no increase that Prometheus could see.
        """
        family = Counter(PREFIX + name, meaning, ("role", label), registry=self.registry)
        for value in known:
            family.labels(self.role, value)
        return lambda value: family.labels(self.role, value)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Distribution:
        distribution = Distribution(self.role, name, meaning, buckets)
        self.registry.register(distribution)
        return distribution


class Distribution:
    """A histogram of one thread, without the library's locks: 0.2 us of CPU for a value, where those take 0.8 us."""

    def __init__(self, role: str, name: str, meaning: str, buckets: Sequence[float]) -> None:
        self._role = role
        self._name = name
        self._meaning = meaning
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(PREFIX + self._name, self._meaning, labels=("role",))
        bounds = [floatToGoString(bound) for bound in self._bounds]
        family.add_metric([self._role], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class _Built:
    def __init__(self, role: str) -> None:
        self._role = role

    def collect(self) -> Iterator[Metric]:
        yield gauge("build_info", "Always 1.", {(self._role, VERSION): 1}, "role", "version")


Values = Mapping[tuple[str, ...], float]  # by the values of the labels


def gauge(name: str, meaning: str, values: Values, *labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def total(name: str, meaning: str, values: Values, *labels: str) -> Metric:
    """A counter that somebody else keeps."""
    family = CounterMetricFamily(PREFIX + name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


# ---- vLLM's names -------------------------------------------------------------------------------------------------


class VllmNames:
    """A collector of the same values under vLLM's names and labels, made of ours whenever somebody asks."""

    def __init__(self, ours: CollectorRegistry, model: Callable[[], str]) -> None:
        self._ours = ours
        self._model = model

    def collect(self) -> Iterator[Metric]:
        model = self._model()
        for family in self._ours.collect():
            for name in VLLM.get(family.name.removeprefix(PREFIX), ()):
                yield self._renamed(family, f"vllm:{name}", model)

    def _renamed(self, family: Metric, name: str, model: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_VLLM_LABELS.get(label, label): text for label, text in sample.labels.items() if label != "role"}
            if labels.get("finished_reason", "stop") not in _SUCCESS:
                continue
            suffix = sample.name.removeprefix(family.name)
            labels |= {"model_name": model, "engine": "0"}
            renamed.samples.append(Sample(name + suffix, labels, sample.value, sample.timestamp))
        return renamed


def shown(ours: CollectorRegistry, compat: str | None, model: Callable[[], str]) -> CollectorRegistry:
    """What /metrics shows: ours, and where `compat` is "vllm" vLLM's names too."""
    if compat is None:
        return ours
    both = CollectorRegistry()
    both.register(ours)
    both.register(VllmNames(ours, model))
    return both


# ---- the line -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """How a process stands. The tokens are totals, `kv_use` is a part of all blocks."""

    running: int
    waiting: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    kv_use: float = 0.0


async def report(look: Callable[[], Reading], say: Callable[[str], None]) -> None:
    """A line for each ten seconds in which something was done, and none for the others. Until cancelled."""
    before = look()
    while True:
        await asyncio.sleep(REPORT_S)
        now = look()
        done = now.prompt_tokens + now.generation_tokens - before.prompt_tokens - before.generation_tokens
        if now.running or now.waiting or done:
            say(line(before, now, REPORT_S))
        before = now


def line(before: Reading, now: Reading, seconds: float) -> str:
    """What this process never does has no part in it."""
    prompt = now.prompt_tokens - before.prompt_tokens
    parts = [f"{now.running} running", f"{now.waiting} waiting"]
    if now.prompt_tokens:
        parts.append(f"{prompt / seconds:.1f} prompt tokens/s")
    if now.generation_tokens:
        parts.append(f"{(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s")
    parts.append(f"KV use {now.kv_use:.1%}")
    if prompt:
        parts.append(f"prefix hits {(now.cached_tokens - before.cached_tokens) / prompt:.1%}")
    return ", ".join(parts)
