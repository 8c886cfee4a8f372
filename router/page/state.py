"""How the router, its workers and the requests in flight stand at one moment, as plain values for JSON.

Reads what the Dispatcher has when somebody asks and keeps nothing. Shows no prompt and no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from heapq import nsmallest
from typing import Any

from router.dispatch import Dispatcher
from router.flow import Flow, LegState
from router.workers import Role, Worker

MAX_REQUESTS = 200  # the oldest are shown; the page says how many there are


def snapshot(dispatcher: Dispatcher, absent: Mapping[tuple[Role, str], str], now: float) -> dict[str, Any]:
    """`absent` are addresses without a session, and why. `now` is the dispatcher's clock. Times are seconds."""
    flows = nsmallest(MAX_REQUESTS, dispatcher.flows.values(), key=lambda flow: flow.submitted_at)
    workers = sorted(dispatcher.workers.all(), key=lambda worker: (worker.role is Role.DECODE, worker.address))
    return {
        "running": len(dispatcher.flows) - dispatcher.waiting,
        "waiting": dispatcher.waiting,
        "workers": [_worker(each) for each in workers],
        "absent": [{"role": role.value, "address": address, "why": why} for (role, address), why in absent.items()],
        "requests": [_request(each, now) for each in flows],
    }


def _worker(worker: Worker) -> dict[str, Any]:
    load, total = worker.load, worker.hello.total_blocks
    free = load.free_blocks if worker.reported else total
    cached = min(load.cached_blocks, free)
    # A ticket's blocks are in use; what a decode worker has promised is still free.
    leased = min(load.leased_blocks, total - free if worker.role is Role.PREFILL else free - cached)
    held = total - free - (leased if worker.role is Role.PREFILL else 0)
    return {
        "role": worker.role.value,
        "address": worker.address,
        "name": worker.hello.node.name,
        "state": worker.why_not or "serving",
        "running": load.running,
        "waiting": load.waiting,
        "max_running": worker.hello.max_num_seqs,
        "step_seconds": load.step_seconds,
        "kv_path": load.kv_path,
        "block_size": worker.hello.layout.block_size,
        "blocks": {"in use": held, "leased": leased, "cached": cached, "free": total - held - leased - cached},
    }


def _request(flow: Flow, now: float) -> dict[str, Any]:
    stage, since = _stage(flow)
    return {
        "id": flow.asked.request_id or str(flow.request),
        "stage": stage,
        "stage_seconds": now - since,
        "age": now - flow.submitted_at,
        "prompt_tokens": len(flow.asked.prompt_ids),
        "tokens": len(flow.log),
        "max_tokens": flow.params.max_tokens,
        "attempt": flow.attempt,
        "workers": {role.value: leg.address for role, leg in flow.legs.items()},
        "times": asdict(flow.times(now)),
    }


def _stage(flow: Flow) -> tuple[str, float]:
    """Where it is and since when: queued, prefill, transfer or decode."""
    decode, prefill = flow.legs.get(Role.DECODE), flow.legs.get(Role.PREFILL)
    if decode is not None and (decode.state is LegState.RUNNING or prefill is None):
        return "decode", decode.placed_at if decode.running_since is None else decode.running_since
    if prefill is not None and len(flow.log) == flow.base:
        return "prefill", prefill.placed_at
    if decode is not None:
        return "transfer", decode.placed_at
    return "queued", flow.wants_since
