"""The observers of both stages as one: series of either role on one /metrics page, and one line for the process.

Each stage keeps its own observer, which hears its own routers; nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from wire.metrics import Reading
from wire.observer import Observer
from wire.tracing import Tracing


class Observers:
    def __init__(self, prefill: Observer, decode: Observer) -> None:
        self._both = (prefill, decode)
        self.registry = CollectorRegistry()
        self.registry.register(_Merged([one.registry for one in self._both]))

    @property
    def tracing(self) -> Tracing:
        return self._both[0].tracing

    @tracing.setter
    def tracing(self, tracing: Tracing) -> None:
        for one in self._both:
            one.tracing = tracing

    @property
    def model(self) -> str:
        return self._both[1].model

    def reading(self) -> Reading:
        """The pool is one: its use is what either says of it."""
        prefill, decode = (one.reading() for one in self._both)
        return Reading(
            prefill.running + decode.running,
            prefill.waiting + decode.waiting,
            prefill.prompt_tokens,
            decode.generation_tokens,
            prefill.cached_tokens,
            decode.kv_use,
        )


class _Merged:
    """Families of one name become one; what both have without a role, such as the process's own, appears once."""

    def __init__(self, registries: list[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in (metric for registry in self._registries for metric in registry.collect()):
            known = families.setdefault(metric.name, metric)
            if known is not metric:
                seen = {(sample.name, tuple(sorted(sample.labels.items()))) for sample in known.samples}
                known.samples += [
                    sample
                    for sample in metric.samples
                    if (sample.name, tuple(sorted(sample.labels.items()))) not in seen
                ]
        yield from families.values()
