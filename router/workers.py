"""Who is up, what each worker said about itself, and which requests of this router it carries.

Sans-IO: sessions call `up` and `down`, the dispatcher asks who may take work. A worker whose KV layout differs from
the one in use is kept and named, never used: its blocks would mean something else. This file
never chooses between eligible workers (policy.py does) and never talks to one.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.messages import CacheChange, KvLayout, WorkerHello, WorkerLoad

MAX_CACHED_HASHES = 65_536  # per worker; at 16 tokens a block about a million tokens of known prefixes


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Worker:
    """One session to one worker process. `jobs` are this router's requests there, with the tokens that each holds."""

    address: str
    role: Role
    hello: WorkerHello
    number: int = 0  # counts ups: a smaller one has been here longer
    load: WorkerLoad = WorkerLoad()
    reported: bool = False  # whether `load` is the worker's own
    heard_at: float = -math.inf  # its last event
    draining: bool = False
    mismatch: str = ""  # why its layout keeps it unused
    jobs: dict[int, int] = field(default_factory=dict)
    hashes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # prefixes it holds, oldest first
    cache_sequence: int | None = None

    @property
    def eligible(self) -> bool:
        return not self.draining and not self.mismatch and not self.load.refuses

    @property
    def why_not(self) -> str:
        """Why it takes no work; empty if it does."""
        return self.mismatch or ("is draining" if self.draining else self.load.refuses)

    @property
    def capacity(self) -> int:
        """The most tokens that one request may have here."""
        return min(self.hello.max_model_len, self.hello.total_blocks * self.hello.layout.block_size)

    def cache_changed(self, change: CacheChange) -> None:
        """A gap in `sequence` means that what we believe is worth nothing: forget it and learn again.

        A snapshot comes at the start of a session, in several messages of one sequence if it is long.
        """
        last = self.cache_sequence
        if last is not None and change.sequence not in (last, last + 1):
            self.hashes.clear()
        self.cache_sequence = change.sequence
        for digest in change.sealed:
            self.hashes[digest] = None
        for digest in change.evicted:
            self.hashes.pop(digest, None)
        while len(self.hashes) > MAX_CACHED_HASHES:
            self.hashes.popitem(last=False)


class Workers:
    """Every worker with a live session, by role and address."""

    def __init__(self, now: float = 0.0) -> None:
        self._workers: dict[Role, dict[str, Worker]] = {role: {} for role in Role}
        self._empty_since: dict[Role, float] = dict.fromkeys(Role, now)
        self._ever_up: dict[Role, bool] = dict.fromkeys(Role, False)
        self._ups = 0
        self.model_digest = b""  # of the model whose tokens this router speaks; empty takes any

    def up(self, address: str, role: Role, hello: WorkerHello, now: float) -> Worker:
        self._ups += 1
        worker = Worker(address, role, hello, self._ups)
        self._workers[role][address] = worker
        self._ever_up[role] = True
        self._check_layouts(now)
        return worker

    def down(self, address: str, role: Role, now: float) -> Worker | None:
        worker = self._workers[role].pop(address, None)
        if worker is not None:
            self._check_layouts(now)
            self._note_empty(role, now, was_eligible=worker.eligible)
        return worker

    def report(self, worker: Worker, load: WorkerLoad, now: float) -> None:
        was_eligible = worker.eligible
        worker.load, worker.reported = load, True
        worker.draining = load.draining
        self._note_empty(worker.role, now, was_eligible)

    def mark_draining(self, worker: Worker, now: float) -> None:
        was_eligible = worker.eligible
        worker.draining = True
        self._note_empty(worker.role, now, was_eligible)

    def get(self, address: str, role: Role) -> Worker | None:
        return self._workers[role].get(address)

    def all(self, role: Role | None = None) -> Iterator[Worker]:
        for each in Role if role is None else (role,):
            yield from self._workers[each].values()

    def eligible(self, role: Role) -> list[Worker]:
        return [worker for worker in self._workers[role].values() if worker.eligible]

    def ready(self) -> bool:
        """Both stages have somebody who takes work."""
        return all(any(worker.eligible for worker in self._workers[role].values()) for role in Role)

    def empty_since(self, role: Role) -> float | None:
        """Since when nobody of this role takes work; None while somebody does."""
        return None if any(worker.eligible for worker in self._workers[role].values()) else self._empty_since[role]

    def ever_up(self, role: Role) -> bool:
        return self._ever_up[role]

    def why_none(self, role: Role) -> str:
        """One sentence: why no worker of this role takes work."""
        workers = list(self._workers[role].values())
        if not workers:
            return f"no {role.value} worker is up"
        reasons = [f"{worker.address} {worker.why_not}" for worker in workers if not worker.eligible]
        return f"no {role.value} worker takes work: " + "; ".join(reasons)

    def _note_empty(self, role: Role, now: float, was_eligible: bool) -> None:
        if was_eligible and not self.eligible(role):
            self._empty_since[role] = now

    def _check_layouts(self, now: float) -> None:
        """Names the workers that cannot exchange KV with those in use."""
        reference = self._reference()
        for worker in self.all():
            before = worker.eligible
            worker.mismatch = self._other_model(worker)
            if not worker.mismatch and reference is not None:
                different = layout_difference(worker.hello.layout, reference.hello.layout)
                other = f"has another KV layout than {reference.address}: {different}"
                worker.mismatch = other if different else ""
            self._note_empty(worker.role, now, before)

    def _reference(self) -> Worker | None:
        """Whose layout counts. One that both stages have goes before one that could serve nobody, so that no stray
        worker takes the service away by being early; then the one in use; then the one that has been here longest.
        """
        own = [worker for worker in self.all() if not self._other_model(worker)]
        stages: dict[KvLayout, set[Role]] = defaultdict(set)
        for worker in own:
            if not worker.draining:
                stages[worker.hello.layout].add(worker.role)

        def order(worker: Worker) -> tuple[bool, bool, int]:
            return len(stages[worker.hello.layout]) < len(Role), worker.mismatch != "", worker.number

        return min(own, key=order, default=None)

    def _other_model(self, worker: Worker) -> str:
        digest = worker.hello.layout.model_digest
        if not self.model_digest or digest == self.model_digest:
            return ""
        return f"serves another model than this router: model_digest is {_show(digest)}, not {_show(self.model_digest)}"


def layout_difference(mine: KvLayout, other: KvLayout) -> str:
    """Field by field, this worker's value against the reference's; empty if they may exchange KV."""
    parts = []
    for name in KvLayout._fields:
        here, there = getattr(mine, name), getattr(other, name)
        if here != there:
            parts.append(f"{name} is {_show(here)}, not {_show(there)}")
    return ", ".join(parts)


def _show(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
