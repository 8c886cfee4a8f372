"""Who may share a worker with whom, so that one poisonous request cannot take ordinary ones with it.

A request that went down with two workers runs only where every other request of this router is a suspect too, and
after the third death alone. If no worker is free of ordinary requests, the oldest waiting suspect reserves the one
with the fewest: it takes no new ordinary work, so it empties and the suspect goes there. While suspects run on a
worker, ordinary requests go elsewhere or wait. One reservation a role at a time, by age: suspects are finite, so
everybody gets a turn. This file moves nobody; it only says where a request may go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.flow import Flow
from router.workers import Role, Worker


class Suspects:
    """`flows` is the dispatcher's own table, read only."""

    def __init__(self, flows: Mapping[int, Flow]) -> None:
        self._flows = flows
        self._reserved: dict[Role, tuple[str, int]] = {}  # worker and the suspect that waits for it

    def company(
        self, flow: Flow, role: Role, workers: Sequence[Worker], eligible: Sequence[Worker]
    ) -> Sequence[Worker]:
        """Those of `workers` where this request may run now. May reserve one. `eligible`: all of the role."""
        reserved, by = self._reservation(role, eligible)
        if flow.suspicion == 0:
            return [worker for worker in workers if worker.address != reserved and not self._on(worker)]
        mine = by == flow.request
        free = [worker for worker in workers if (mine or worker.address != reserved) and self._may_join(flow, worker)]
        if free:
            if mine:
                del self._reserved[role]
            return [max(free, key=lambda worker: len(worker.jobs))]  # suspects gather on one worker
        if workers and not reserved:
            fewest = min(workers, key=lambda worker: (len(worker.jobs) - len(self._on(worker)), worker.address))
            self._reserved[role] = (fewest.address, flow.request)
        return []

    def review(self, flow: Flow) -> None:
        """Gives up a reservation that its suspect no longer needs: placed, ended, or no suspect after all."""
        for role, (_, suspect) in list(self._reserved.items()):
            if suspect == flow.request and (flow.wants is not role or flow.suspicion == 0):
                del self._reserved[role]

    def _reservation(self, role: Role, eligible: Sequence[Worker]) -> tuple[str, int]:
        reserved, by = self._reserved.get(role, ("", 0))
        if reserved and all(worker.address != reserved for worker in eligible):
            del self._reserved[role]
            return "", 0
        return reserved, by

    def _may_join(self, flow: Flow, worker: Worker) -> bool:
        if flow.suspicion > 1:
            return not worker.jobs
        others = self._on(worker)
        return len(others) == len(worker.jobs) and all(other.suspicion == 1 for other in others)

    def _on(self, worker: Worker) -> list[Flow]:
        return [self._flows[request] for request in worker.jobs if self._flows[request].suspicion > 0]
