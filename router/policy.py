"""Which worker takes a request: pure choices over values that workers.py holds.

Prefill: the least work ahead, a cached prefix counting as work already done. Decode: where the prompt is, if that
process has both stages; else the least projected resident KV of two random choices, so that routers that see the same
loads do not all pick the same worker.
This file decides nothing about who is eligible and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.messages import Node
from engine.prefix_cache import chain, root_digest
from router.workers import Role, Worker

POLICIES = {Role.PREFILL: "least_work", Role.DECODE: "two_choices"}  # their names, for whoever counts picks


def pick_prefill(workers: Sequence[Worker], token_ids: Sequence[int], hashes: Sequence[bytes]) -> Worker | None:
    """Least of (reported waiting tokens + own tokens in flight + what is left of this prompt). Ties: fewest jobs."""

    def cost(worker: Worker) -> tuple[int, int]:
        new = len(token_ids) - cached_tokens(worker, hashes, len(token_ids))
        return worker.load.waiting_tokens + sum(worker.jobs.values()) + new, len(worker.jobs)

    return min(workers, key=cost, default=None)


def pick_decode(workers: Sequence[Worker], rng: random.Random, owner: Node | None = None) -> Worker | None:
    """The process that computed the prompt, if it decodes too, as nothing has to move there; else of two random workers
    the one whose pool would be emptier."""
    if not workers:
        return None
    for worker in workers:
        node = worker.hello.node
        if owner is not None and (node.incarnation, node.address) == (owner.incarnation, owner.address):
            return worker
    return min(rng.sample(list(workers), min(2, len(workers))), key=resident_share)


def resident_share(worker: Worker) -> float:
    """Blocks in use, as reported or as this router's own requests imply (a load report lags), over the pool."""
    hello = worker.hello
    own = sum(-(-tokens // hello.layout.block_size) for tokens in worker.jobs.values())
    reported = hello.total_blocks - worker.load.free_blocks if worker.reported else 0
    return max(own, reported) / max(1, hello.total_blocks)


def cached_tokens(worker: Worker, hashes: Sequence[bytes], num_tokens: int) -> int:
    """Tokens of the longest known prefix; the last position is always computed."""
    size = worker.hello.layout.block_size
    held = 0
    for digest in hashes[: max(0, num_tokens - 1) // size]:
        if digest not in worker.hashes:
            break
        held += 1
    return held * size


def prompt_hashes(worker: Worker, namespace: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The chain that every worker of this layout would compute for this prompt."""
    layout = worker.hello.layout
    root = root_digest(namespace, layout.model_digest, "", layout.dtype, layout.block_size)
    return chain(root, token_ids, layout.block_size)
