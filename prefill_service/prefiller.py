"""The prefill stage: jobs of sessions, their tickets and their blocks. Sans-IO: an event and a time in, actions out.

Composes the scheduler (what is computed when) with the outbox (who may fetch it). Owns every block table from
acceptance until the outbox lets the ticket go and no step can write into it. Never waits, never reads a clock,
never raises for what a peer says: late, unknown and repeated messages are counted in `ignored`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.batch import Batch, StepOutput
from engine.blocks import BlockPool, BlockTable, num_blocks_for
from engine.config import EngineConfig
from engine.messages import (
    CacheChange,
    Cancel,
    Drain,
    Failed,
    FirstToken,
    Heartbeat,
    KvLayout,
    Node,
    PrefillAccepted,
    PrefillCommand,
    PrefillEvent,
    PrefillStart,
    PullRequest,
    Reason,
    Refused,
    RouterHello,
    StageTimes,
    Ticket,
    WorkerLoad,
)
from engine.prefix_cache import chain, root_digest
from engine.stopping import finish_of
from engine.types import TokenLogprob
from kvtransfer.actions import Action, FreeTicket, HandOver, ToRouter
from kvtransfer.jobs import JobKey, Tombstones, invalid_start
from kvtransfer.outbox import TRANSPORTS, Outbox
from kvtransfer.ticket import layout_digest, mint
from prefill_service.scheduler import Filling, PrefillJob, PrefillScheduler, Progress

TICKET_TTL = 60.0  # seconds that a ticket without a Pull is kept
DIGESTS_PER_MESSAGE = 4096  # a snapshot of a large cache is cut into messages of this many block hashes


@dataclass(frozen=True, slots=True)
class Lease:
    """A computed prompt, held for whoever pulls it."""

    key: JobKey
    ticket: int


class Promises(Protocol):
    """What a decode stage on the same pool says of it."""

    @property
    def promised(self) -> int:
        """Available blocks that are spoken for."""

    @property
    def stalled(self) -> bool:
        """A running sequence waits for a block: nothing is admitted."""


class Prefiller:
    """`pool` may be shared with a decode stage in the same process (the local transport). Prefill then admits nothing
    that would break that stage's `promises`, which are read anew at each admission; without one they are set by hand.

    `depth` steps may be in flight.
    """

    def __init__(
        self,
        node: Node,
        layout: KvLayout,
        config: EngineConfig,
        pool: BlockPool,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        rng: random.Random,
        digests: bool = True,
        max_waiting: int = 256,
        ticket_ttl: float = TICKET_TTL,
        promises: Promises | None = None,
        depth: int = 1,
        transports: Collection[str] = TRANSPORTS,
    ) -> None:
        self.layout = layout
        self.config = config
        self.pool = pool
        pool.follow_changes()
        self.promised = 0
        self.stalled = False
        self.budget = config.max_num_batched_tokens  # of the next step; whoever shares the device may lower it
        self._promises = promises
        self.draining = False
        self.ignored: Counter[str] = Counter()
        self.expired_leases = 0  # computed prompts that nobody came for in time
        self.sessions: dict[int, RouterHello] = {}
        self.scheduler = PrefillScheduler(pool, config, eos_token_ids, digests=digests, depth=depth)
        self.outbox = Outbox(
            node, layout_digest(layout), ticket_ttl, block_bytes=layout.block_bytes, transports=transports
        )
        self._node = node
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._rng = rng
        self._max_waiting = max_waiting
        self._ticket_ttl = ticket_ttl
        self._jobs: dict[JobKey, PrefillJob | Filling | Lease] = {}
        self._owners: dict[int, JobKey] = {}  # ticket -> its live job
        self._tables: dict[int, BlockTable] = {}  # ticket -> blocks, until nobody can read or write them
        self._free_after_step: list[int] = []
        self._tombstones = Tombstones()
        self._drain_until = 0.0
        self._step_seconds = 0.0
        self._token_seconds = 0.0  # moving average of a step's time per token
        self._cached: dict[bytes, None] = {}  # names in the prefix cache, as the sessions know them
        self._cache_sequence = 0
        self._sent_load: dict[int, WorkerLoad] = {}

    # ---- sessions ---------------------------------------------------------------------------------------------

    def attach(self, session: int, hello: RouterHello, now: float) -> list[Action]:
        """A newer session of the same router incarnation ends its older ones; a late older one is not attached."""
        router = (hello.router, hello.incarnation)
        same = [s for s, other in self.sessions.items() if (other.router, other.incarnation) == router]
        if any(self.sessions[other].session > hello.session for other in same):
            self.ignored["old_session"] += 1
            return []
        actions: list[Action] = []
        for other in {*same, *self.sessions.keys() & {session}}:
            actions += self.detach(other, now)
        self.sessions[session] = hello
        names = list(self._cached)
        actions += [self._load_for(session)]
        actions += [
            ToRouter(session, CacheChange(names[i : i + DIGESTS_PER_MESSAGE], (), self._cache_sequence))
            for i in range(0, len(names), DIGESTS_PER_MESSAGE)
        ]
        return actions

    def detach(self, session: int, now: float) -> list[Action]:
        """The session ended: its jobs are cancelled, and no others."""
        if self.sessions.pop(session, None) is None:
            self.ignored["unknown_session"] += 1
            return []
        self._sent_load.pop(session, None)
        actions: list[Action] = []
        for key in [key for key in self._jobs if key[0] == session]:
            actions += self._end(key, now)
        return actions + self.admit(now)

    def on_command(self, session: int, command: PrefillCommand, now: float) -> list[Action]:
        if session not in self.sessions:
            self.ignored["unknown_session"] += 1
            return []
        match command:
            case PrefillStart():
                return self._start(session, command, now)
            case Cancel():
                return self._cancel((session, command.key), now)
            case Drain():
                return self.drain(command.grace, now)
            case Heartbeat():
                return []

    # ---- a job begins -----------------------------------------------------------------------------------------

    def _start(self, session: int, start: PrefillStart, now: float) -> list[Action]:
        key = (session, start.key)
        if key in self._jobs:
            self.ignored["duplicate_start"] += 1
            return []
        if key in self._tombstones:
            self.ignored["start_after_end"] += 1
            return []
        if refused := self._refusal(start):
            return [ToRouter(session, refused)]
        job = PrefillJob(session, start, self._hashes(start), now, now - start.age, now + start.deadline)
        self._jobs[key] = job
        self.scheduler.enqueue(job)
        return self.admit(now)

    def _refusal(self, start: PrefillStart) -> Refused | None:
        """Why this start cannot be served, now or ever."""
        if self.draining:
            return Refused(start.key, Reason.DRAINING)
        if facts := invalid_start(start, self.config.max_model_len, self._vocab_size):
            return Refused(start.key, Reason.INVALID_FIELD, facts=facts)
        blocks, size = self.pool.num_blocks, self.config.block_size
        if (needed := num_blocks_for(len(start.token_ids), size)) > blocks:
            facts = _text(needed_blocks=needed, total_blocks=blocks, largest=blocks * size)
            return Refused(start.key, Reason.OUT_OF_BLOCKS, facts=facts)
        if (waiting := len(self.scheduler.waiting)) >= self._max_waiting:
            after = self._retry_after()
            facts = _text(waiting=waiting, limit=self._max_waiting, retry_after=f"{after:.1f}")
            return Refused(start.key, Reason.QUEUE_FULL, after, facts)
        return None

    def _retry_after(self) -> float:
        """Seconds until about a quarter of the queue is computed."""
        return min(30.0, max(0.1, self.scheduler.waiting_tokens * self._token_seconds / 4))

    def _hashes(self, start: PrefillStart) -> list[bytes]:
        layout = self.layout
        root = root_digest(start.cache_namespace, layout.model_digest, "", layout.dtype, layout.block_size)
        return chain(root, start.token_ids, layout.block_size)

    def admit(self, now: float) -> list[Action]:
        """Accepts waiting jobs, oldest first, while their whole prompts fit: after every event, and when another stage
        on the same pool gave blocks back."""
        if not self.scheduler.waiting:
            return []
        actions: list[Action] = []
        if self._promises is not None:
            self.promised, self.stalled = self._promises.promised, self._promises.stalled
        while not self.stalled and (filling := self.scheduler.admit(mint(self._rng, self._tables), now, self.promised)):
            job, table = filling.job, filling.table
            ticket = Ticket(
                id=filling.ticket,
                owner=self._node,
                num_tokens=job.num_tokens,
                num_blocks=len(table.blocks),
                time_to_live=self._ticket_ttl,
                block_hashes=job.hashes,
            )
            self._jobs[job.key] = filling
            self._owners[ticket.id] = job.key
            self._tables[ticket.id] = table
            if not job.last_token:
                generations = [self.pool.generation(block) for block in table.blocks]
                self.outbox.offer(ticket, job.start.key, job.session, job.deadline_at, table.blocks, generations, now)
            cached_tokens = filling.reused * self.config.block_size
            actions.append(ToRouter(job.session, PrefillAccepted(job.start.key, ticket, cached_tokens)))
            if filling.reused and ticket.id in self.outbox:
                actions += self._settle(self.outbox.sealed(ticket.id, self.scheduler.reused_handles(filling), now), now)
        return actions

    # ---- a step -----------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> Batch | None:
        """The next step's work; None while `depth` steps are in flight or nothing is left to compute."""
        return self.scheduler.next_batch(self.budget)

    def on_step(self, output: StepOutput, now: float) -> list[Action]:
        tokens = sum(chunk.count for chunk in self.scheduler.flights[0])
        self._step_seconds = _average(self._step_seconds, output.seconds)
        self._token_seconds = _average(self._token_seconds, output.seconds / max(1, tokens))
        first: list[Action] = []  # token 0 goes to the client ahead of everything else
        rest: list[Action] = []
        for progress in self.scheduler.finish(output):
            filling = progress.filling
            if self._owners.get(filling.ticket) is None:
                continue  # ended while the step ran
            if progress.sealed and filling.ticket in self.outbox:
                rest += self.outbox.sealed(filling.ticket, progress.sealed, now)
            if progress.token is not None:
                event = self._first_token(progress, now)
                first.append(ToRouter(filling.job.session, event))
                rest += self._complete(filling, event, now)
        self._release_after_step()
        return first + self._settle(rest, now) + self._cache_changes() + self.admit(now)

    def step_failed(self, facts: dict[str, str], now: float) -> list[Action]:
        """The step raised: its requests fail, all others go on."""
        actions: list[Action] = []
        for filling in self.scheduler.abandon():
            if (key := self._owners.get(filling.ticket)) is not None:
                actions.append(_failed(key, Reason.INTERNAL, facts))
                actions += self._end(key, now)
        self._release_after_step()
        return actions + self.admit(now)

    def _first_token(self, progress: Progress, now: float) -> FirstToken:
        filling, token = progress.filling, progress.token
        job = filling.job
        assert token is not None and token.index == job.start.emitted, f"{job.start.key}: {token} is not token 0"
        reason, stop_token_id = finish_of(token.token_id, token.index, job.start.params, self._eos)
        prompt_logprobs: list[TokenLogprob] = []
        if job.wants_prompt_logprobs:  # nothing predicts the first prompt token
            prompt_logprobs = [TokenLogprob(job.start.token_ids[0], None, None), *filling.prompt_logprobs]
        times = StageTimes(queued=filling.admitted - job.arrived, computed=now - filling.admitted)
        return FirstToken(job.start.key, token, reason, stop_token_id, prompt_logprobs, times)

    def _complete(self, filling: Filling, event: FirstToken, now: float) -> list[Action]:
        """The prompt is computed: the job becomes a lease, or is over if token 0 ends the request."""
        key, ticket = filling.job.key, filling.ticket
        actions = self.outbox.first_token(ticket, event, now) if ticket in self.outbox else []
        if event.finish_reason is None:
            self._jobs[key] = Lease(key, ticket)
            return actions
        return actions + self._end(key, now)

    # ---- a job ends -------------------------------------------------------------------------------------------

    def _cancel(self, key: JobKey, now: float) -> list[Action]:
        if key not in self._jobs:
            self.ignored["unknown_cancel"] += 1
            self._tombstones.add(key, now)  # a start that arrives late must not begin
            return []
        return self._end(key, now) + self.admit(now)

    def _end(self, key: JobKey, now: float) -> list[Action]:
        """Forgets the job. Its blocks follow when the outbox frees the ticket and no step writes into them."""
        job = self._forget(key, now)
        if isinstance(job, PrefillJob):
            self.scheduler.waiting.remove(job)
            return []
        revoked = self.outbox.revoke(job.ticket, now) if job.ticket in self.outbox else [FreeTicket(job.ticket, None)]
        return self._settle(revoked, now)

    def _forget(self, key: JobKey, now: float) -> PrefillJob | Filling | Lease:
        job = self._jobs.pop(key)
        self._tombstones.add(key, now)
        if not isinstance(job, PrefillJob):
            del self._owners[job.ticket]
        if isinstance(job, Filling):
            self.scheduler.drop(job)
        return job

    def _settle(self, actions: Iterable[Action], now: float) -> list[Action]:
        """Takes the outbox's FreeTickets out of `actions` and gives the blocks back; the rest is the driver's."""
        others: list[Action] = []
        for action in actions:
            if isinstance(action, FreeTicket | HandOver) and (key := self._owners.get(action.ticket)) is not None:
                others += self._lost_ticket(key, action.reason if isinstance(action, FreeTicket) else None, now)
            if isinstance(action, FreeTicket):
                self._free(action.ticket)
                continue
            if isinstance(action, HandOver):  # the references go with it
                self._tables.pop(action.ticket).hand_over()
            others.append(action)
        return others

    def _free(self, ticket: int) -> None:
        if self.scheduler.is_in_flight(ticket):  # the step may still write
            self._free_after_step.append(ticket)
        else:
            self._tables.pop(ticket).release(self.pool)

    def _lost_ticket(self, key: JobKey, reason: Reason | None, now: float) -> list[Action]:
        """The outbox ended the ticket of a live job: delivered, expired or past its deadline."""
        job = self._forget(key, now)
        if isinstance(job, Lease):  # its router has token 0, and learns the rest from the decode worker
            self.expired_leases += reason is not None
            return []
        return [_failed(key, reason or Reason.STALE_TICKET, resumable=reason is not Reason.DEADLINE)]

    def _release_after_step(self) -> None:
        tickets, self._free_after_step = self._free_after_step, []
        for ticket in tickets:
            self._free(ticket)

    # ---- pulls ------------------------------------------------------------------------------------------------

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]:
        return self._settle(self.outbox.pull_message(pull, message, now), now) + self.admit(now)

    def pull_closed(self, pull: int, now: float) -> list[Action]:
        return self._settle(self.outbox.pull_closed(pull, now), now) + self.admit(now)

    def sent(self, pull: int, position: int, now: float) -> list[Action]:
        return self._settle(self.outbox.sent(pull, position), now) + self.admit(now)

    # ---- time -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Deadlines, expiry, the end of grace; about four times a second, whether or not there is traffic."""
        actions: list[Action] = []
        for key, job in list(self._jobs.items()):
            held = job.job if isinstance(job, Filling) else job
            if isinstance(held, PrefillJob) and held.deadline_at <= now:
                actions.append(_failed(key, Reason.DEADLINE))
                actions += self._end(key, now)
        actions += self._settle(self.outbox.tick(now), now)
        if self.draining and now >= self._drain_until:
            actions += self._end_of_grace(now)
        self._tombstones.expire(now)
        actions += self.admit(now) + self._cache_changes()
        load = self.load()
        return actions + [self._load_for(s) for s in self.sessions if self._sent_load.get(s) != load]

    def drain(self, grace: float, now: float) -> list[Action]:
        """Refuses what is not accepted yet; what is accepted is computed and served until `grace` has passed."""
        if self.draining:
            self._drain_until = min(self._drain_until, now + grace)
            return []
        self.draining = True
        self._drain_until = now + grace
        actions: list[Action] = []
        for job in list(self.scheduler.waiting):
            actions.append(ToRouter(job.session, Refused(job.start.key, Reason.DRAINING)))
            actions += self._end(job.key, now)
        return actions

    def _end_of_grace(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for key in list(self._jobs):
            actions.append(_failed(key, Reason.DRAINING, resumable=True))
            actions += self._end(key, now)
        return actions

    # ---- what others may know ---------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        scheduler = self.scheduler
        return WorkerLoad(
            running=len(scheduler.filling),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=self.pool.available,
            leased_blocks=sum(len(table.blocks) for table in self._tables.values()),
            step_seconds=self._step_seconds,
            draining=self.draining,
            cached_blocks=self.pool.cached,
        )

    def _load_for(self, session: int) -> ToRouter:
        load = self._sent_load[session] = self.load()
        return ToRouter(session, load)

    def _cache_changes(self) -> list[Action]:
        sealed, evicted = self.pool.drain_changes()
        if not sealed and not evicted:
            return []
        for digest in evicted:
            self._cached.pop(digest, None)
        self._cached.update(dict.fromkeys(sealed))
        self._cache_sequence += 1
        change: PrefillEvent = CacheChange(sealed, evicted, self._cache_sequence)
        return [ToRouter(session, change) for session in self.sessions]

    @property
    def idle(self) -> bool:
        """Nothing is waiting, computed or leased."""
        return not self._jobs and not self._tables and not self.scheduler.flights

    def holders(self) -> list[list[int]]:
        """Every reference that this stage holds, for the pool's audit; a shared pool is audited over both stages'."""
        return [table.blocks for table in self._tables.values()]

    def audit(self, others: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError if a block or a job is unaccounted for."""
        self.pool.audit([*self.holders(), *others])
        fillings = [job for job in self._jobs.values() if isinstance(job, Filling)]
        waiting = [job for job in self._jobs.values() if isinstance(job, PrefillJob)]
        assert sorted(map(id, fillings)) == sorted(map(id, self.scheduler.filling)), "a filling prompt has no job"
        assert sorted(map(id, waiting)) == sorted(map(id, self.scheduler.waiting)), "a waiting prompt has no job"
        assert all(key[0] in self.sessions for key in self._jobs), "a job outlived its session"
        assert self._owners.keys() <= self._tables.keys(), "a live ticket has no blocks"
        assert len(self._jobs) == len(self._owners) + len(waiting), "a job has no ticket"


def _failed(key: JobKey, reason: Reason, facts: dict[str, str] | None = None, *, resumable: bool = False) -> ToRouter:
    session, request = key
    return ToRouter(session, Failed(request, reason, resumable, facts or {}))


def _text(**facts: int | str) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items()}


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + 0.2 * (new - old)
