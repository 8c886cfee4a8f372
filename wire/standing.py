"""How a worker stands, as Prometheus series: read from its core whenever somebody asks, never kept twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric

from engine.messages import KvPath, WorkerHello, WorkerLoad
from wire.metrics import Values, gauge, total


class Pool(Protocol):
    def ledger(self) -> dict[str, int]:
        """Blocks by state; each block counts once."""


class Core(Protocol):
    """A Prefiller or a Decoder, as far as its standing goes."""

    ignored: Counter[str]

    @property
    def pool(self) -> Pool: ...
    def load(self) -> WorkerLoad: ...


class Standing:
    """A collector. `model` is what the worker serves, `expired` how many leases nobody came for, if it grants any."""

    def __init__(
        self, role: str, core: Core, hello: WorkerHello, model: str, expired: Callable[[], int] | None
    ) -> None:
        self._expired = expired
        self.core = core
        self.model = model
        self._role = role
        self._hello = hello

    def usage(self, load: WorkerLoad) -> float:
        blocks = max(1, self._hello.total_blocks)
        return (blocks - load.free_blocks) / blocks

    def collect(self) -> Iterator[Metric]:
        role, load = self._role, self.core.load()
        for name, meaning, value in (
            ("requests_running", "Requests in the engine's steps.", load.running),
            ("requests_waiting", "Requests that wait for their place.", load.waiting),
            ("waiting_tokens", "Prompt tokens of requests that wait, or are not computed yet.", load.waiting_tokens),
            ("kv_cache_usage_ratio", "KV blocks in use, of all.", self.usage(load)),
            ("kv_blocks_leased", "KV blocks that tickets hold, or that are promised.", load.leased_blocks),
            ("draining", "1 while it takes nothing new.", int(load.draining)),
        ):
            yield gauge(name, meaning, {(role,): value}, "role")
        ledger: Values = {(role, state): count for state, count in self.core.pool.ledger().items()}
        yield gauge("kv_blocks", "KV blocks by state.", ledger, "role", "state")
        ignored: Values = {(role, kind): count for kind, count in self.core.ignored.items()}
        yield total("ignored_messages", "Messages that came late, twice or for nobody.", ignored, "role", "kind")
        yield self._config()
        if self._expired is not None:
            leases: Values = {(role,): self._expired()}
            yield total("kv_lease_expired", "Computed prompts that nobody came for in time.", leases, "role")
        if role == "decode":
            yield from self._paths(load)

    def _config(self) -> Metric:
        layout = self._hello.layout
        labels = {
            "role": self._role,
            "block_size": str(layout.block_size),
            "num_blocks": str(self._hello.total_blocks),
            "block_bytes": str(layout.block_bytes),
            "cache_dtype": layout.dtype,
            "model": self.model,
        }
        return gauge("cache_config_info", "Always 1.", {tuple(labels.values()): 1}, *labels)

    def _paths(self, load: WorkerLoad) -> Iterator[Metric]:
        """How KV blocks came, by the prefill worker that owned them."""
        role, paths = self._role, load.kv_paths
        yield total("kv_transfer_blocks", "KV blocks copied in.", {(role,): load.pulled_blocks}, "role")
        labels = ("role", "owner", "transport")
        keys = {(role, path.owner, path.transport or "none"): path for path in paths}
        for name, meaning, read in (
            ("kv_transfer_bytes", "Bytes of KV blocks copied in.", _bytes),
            ("kv_transfers", "Prompts whose KV blocks all came in.", _transfers),
        ):
            yield total(name, meaning, {key: read(path) for key, path in keys.items()}, *labels)
        rates: Values = {key: path.bytes_per_second for key, path in keys.items()}
        yield gauge("kv_path_bytes_per_second", "What a path carries, as last measured.", rates, *labels)


def _bytes(path: KvPath) -> float:
    return path.bytes


def _transfers(path: KvPath) -> float:
    return path.transfers
