"""The decode stage: jobs of sessions, their pulls and their blocks. Sans-IO: an event and a time in, actions out.

Composes the scheduler (who owns blocks, who gives way) with the inbox (what has landed). Gives a block back only
when nothing can write into it: after the step in flight, after the last copy. Never waits, never reads a clock,
never raises for what a peer says: late, unknown and repeated messages are counted in `ignored`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from decode_service.job import Flight, Job, echo, failed
from decode_service.refusal import refusal
from decode_service.scheduler import UNBOUND, DecodeScheduler, Slot
from engine.batch import Batch, StepOutput
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.messages import (
    Cancel,
    Credit,
    DecodeCommand,
    DecodeStart,
    Drain,
    Finish,
    Heartbeat,
    KvLayout,
    KvPath,
    Node,
    Peers,
    PullEvent,
    Reason,
    Refused,
    RouterHello,
    Row,
    StepBatch,
    WorkerLoad,
)
from engine.prefix_cache import block_digest, chain, last_name, root_digest
from engine.stopping import finish_of
from kvtransfer.actions import Action, Adopted, Announced, Drained, Landed, MeetPeers, PullFailed, Ready, ToRouter
from kvtransfer.inbox import PROGRESS_SECONDS, Inbox
from kvtransfer.jobs import JobKey, Tombstones
from kvtransfer.ticket import layout_digest

LOCAL = "local"
_new = tuple.__new__  # of a NamedTuple, at half its constructor's price
MOST_PATHS = 8  # words on how blocks came, of which the newest are kept
CREDIT_PATIENCE = 0.5  # seconds without credit, after which a running slot gives way to one that waits


class Decoder:
    """`pool` may be shared with a prefill stage in the same process; that stage then keeps off the blocks that
    `promised` counts, and admits nothing while `stalled`. Its tickets come without a copy.

    `depth` steps may be in flight: a runner that knows the newest tokens before we do gets the next step before the
    last one is reported.
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
        transport: str = "grpc",
        max_waiting: int = 256,
        headroom: int = 2,
        progress_seconds: float = PROGRESS_SECONDS,
        depth: int = 1,
    ) -> None:
        self.layout = layout
        self.config = config
        self.pool = pool
        self.draining = False
        self.ignored: Counter[str] = Counter()
        self.sessions: dict[int, RouterHello] = {}
        self.kv_paths: Callable[[], Sequence[KvPath]] = tuple  # whoever drives the pulls knows them
        self.refuses: Callable[[], str] = str
        self.scheduler = DecodeScheduler(pool, layout.block_size, config.max_num_seqs, max_waiting, headroom)
        self.inbox = Inbox(layout_digest(layout), progress_seconds=progress_seconds)
        self._node = node
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._transport = transport
        self._jobs: dict[JobKey, Job] = {}
        self._by_slot: dict[int, Job] = {}
        self._by_pull: dict[int, Job] = {}
        self._depth = depth
        self._flights: deque[Flight] = deque()  # the oldest first
        self._draining_blocks: dict[int, list[int]] = {}  # pull -> blocks that its copies may still write into
        self._tombstones = Tombstones()
        self._last_slot = 0
        self._pulled_blocks = 0
        self._kv_paths: dict[str, None] = {}
        self._steps = 0
        self._step_seconds = 0.0
        self._drain_until = 0.0
        self._sent_load: dict[int, WorkerLoad] = {}

    # ---- sessions -------------------------------------------------------------------------------------------------

    def attach(self, session: int, hello: RouterHello, now: float) -> list[Action]:
        """A newer session of the same router incarnation ends its older ones; a late older one is not attached."""
        actions: list[Action] = []
        for other, known in list(self.sessions.items()):
            if (known.router, known.incarnation) == (hello.router, hello.incarnation):
                if known.session > hello.session:
                    self.ignored["old_session"] += 1
                    return []
                actions += self.detach(other, now)
        self.sessions[session] = hello
        return [*actions, self._load_for(session)]

    def detach(self, session: int, now: float) -> list[Action]:
        """The session ended: its jobs are cancelled, and no others."""
        if self.sessions.pop(session, None) is None:
            self.ignored["unknown_session"] += 1
            return []
        self._sent_load.pop(session, None)
        actions: list[Action] = []
        for job in [job for job in self._jobs.values() if job.session == session]:
            actions += self._end(job, now)
        return actions + self._settle(now)

    def on_command(self, session: int, command: DecodeCommand, now: float) -> list[Action]:
        if session not in self.sessions:
            self.ignored["unknown_session"] += 1
            return []
        match command:
            case DecodeStart():
                return self._start(session, command, now)
            case Cancel():
                return self._cancel((session, command.key), now)
            case Credit():
                return self._credit((session, command.key), command.until_index, now)
            case Drain():
                return self.drain(command.grace, now)
            case Peers():
                return [MeetPeers(command.owners)]
            case Heartbeat():
                return []

    # ---- a job begins ---------------------------------------------------------------------------------------------

    def _start(self, session: int, start: DecodeStart, now: float) -> list[Action]:
        """Opens the Pull at once, even while there is no room: an open Pull keeps the lease."""
        key = (session, start.key)
        if key in self._jobs:
            self.ignored["duplicate_start"] += 1
            return []
        if key in self._tombstones:
            self.ignored["start_after_end"] += 1
            return []
        if self.draining:
            return [ToRouter(session, Refused(start.key, Reason.DRAINING))]
        if refused := refusal(start, self.scheduler, self.config.max_model_len, self._vocab_size, self._step_seconds):
            return [ToRouter(session, refused)]
        job = self._job(session, start, now)
        transport = LOCAL if job.slot.lent else self._transport
        job.path = transport
        job.pull, actions = self.inbox.open(start.ticket, start.key, (), transport, now, start.request_id)
        self._jobs[key] = self._by_slot[job.slot.id] = self._by_pull[job.pull] = job
        self.scheduler.add(job.slot)
        return actions + self._settle(now)

    def _job(self, session: int, start: DecodeStart, now: float) -> Job:
        layout, split = self.layout, len(start.token_ids) - start.emitted
        root = root_digest(start.cache_namespace, layout.model_digest, "", layout.dtype, layout.block_size)
        local = start.ticket.owner.incarnation == self._node.incarnation
        # From the tokens themselves: the ticket's list of hashes is another worker's claim. Adopted blocks have names.
        hashes = [] if local else chain(root, start.token_ids, layout.block_size)
        self._last_slot += 1
        job = Job(
            session=session,
            start=start,
            slot=Slot(self._last_slot, len(start.token_ids), now - start.age, hashes, lent=local),
            digest=hashes[-1] if hashes else root,
            arrived=now,
            deadline_at=now + start.deadline,
            prompt=start.token_ids[:split],
            output=list(start.token_ids[split:]),
            ends=self._eos.union(start.params.stop_token_ids),
        )
        job.grant(start.until_index)
        job.slot.credit = job.has_credit
        return job

    def _credit(self, key: JobKey, until_index: int, now: float) -> list[Action]:
        if (job := self._jobs.get(key)) is None:
            self.ignored["unknown_credit"] += 1
            return []
        job.grant(until_index)
        if job.has_credit:
            job.slot.credit, job.slot.parked, job.no_credit_since = True, False, None
        return self._settle(now)

    # ---- blocks arrive --------------------------------------------------------------------------------------------

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]:
        return self._absorb(self.inbox.message(pull, event, now), now) + self._settle(now)

    def copied(self, pull: int, digests: Mapping[int, int], now: float) -> list[Action]:
        """The bytes of these positions are in place, and their digests were computed from them."""
        return self._absorb(self.inbox.copied(pull, digests, now), now) + self._settle(now)

    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]:
        return self._absorb(self.inbox.copy_failed(pull, position, now), now) + self._settle(now)

    def pull_stream_closed(self, pull: int, now: float) -> list[Action]:
        return self._absorb(self.inbox.stream_closed(pull, now), now) + self._settle(now)

    def reroute(self, pull: int, transport: str, path: str) -> None:
        """How this pull's bytes come, now that its owner was met. `path` says it in words."""
        self.inbox.reroute(pull, transport)
        if job := self._by_pull.get(pull):
            job.path = path

    def no_path(self, pull: int, cause: str, now: float) -> list[Action]:
        """Nothing can be pulled from this owner."""
        job = self._by_pull.get(pull)
        facts = {"owner": job.start.ticket.owner.address, "cause": cause} if job else {}
        return self._absorb(self.inbox.no_path(pull, facts), now) + self._settle(now)

    def adopted(self, pull: int, blocks: Sequence[int], now: float) -> list[Action]:
        """The local transport: these references are ours from here on."""
        return self._absorb(self.inbox.adopted(pull, blocks, now), now) + self._settle(now)

    def destination(self, pull: int, position: int) -> int | None:
        """Where the bytes of this position may be written at this moment; None: nowhere."""
        return self.inbox.destination(pull, position)

    def block_tokens(self, pull: int, position: int) -> list[int]:
        """The tokens that this position's block stands for: its digest covers them."""
        job, size = self._by_pull.get(pull), self.layout.block_size
        return [] if job is None else job.tokens(position * size, (position + 1) * size)

    def _absorb(self, actions: Iterable[Action], now: float) -> list[Action]:
        """Acts on the inbox's notices; what is left is the driver's."""
        rest: list[Action] = []
        for action in actions:
            match action:
                case Announced():
                    rest += self._announced(action, now)
                case Landed():
                    if job := self._by_pull.get(action.pull):
                        job.landed.update(action.positions)
                        self._came_by(job.path)
                    self._pulled_blocks += len(action.positions)
                case Ready() | Adopted():
                    rest += self._ready(action, now)
                case PullFailed():
                    if job := self._by_pull.get(action.pull):
                        rest.append(failed(job, action.reason, resumable=True, facts=action.facts))
                        self._forget(job, now)
                case Drained():
                    self._draining_blocks.pop(action.pull, None)
                    self.pool.give(action.blocks)
                case _:
                    rest.append(action)
        return rest

    def _came_by(self, path: str) -> None:
        """A path's words hold figures and reasons, which are others each time it is proved."""
        self._kv_paths[path] = None
        if len(self._kv_paths) > MOST_PATHS:
            del self._kv_paths[next(iter(self._kv_paths))]

    def _announced(self, notice: Announced, now: float) -> list[Action]:
        if (job := self._by_pull.get(notice.pull)) is None:
            return []
        job.announced += notice.positions
        return [] if job.admitted is None else self._bind(job, now)

    def _bind(self, job: Job, now: float) -> list[Action]:
        """Gives every announced position its destination; from here on bytes flow for it."""
        assert job.pull is not None, f"{job.key} binds without a pull"
        positions = [position for position in job.announced if position >= job.slot.held]
        job.announced = []
        destinations = self.scheduler.bind(job.slot, positions)
        return self._absorb(self.inbox.bind(job.pull, dict(zip(positions, destinations, strict=True)), now), now)

    def _ready(self, notice: Ready | Adopted, now: float) -> list[Action]:
        job, first = self._by_pull.get(notice.pull), notice.first_token
        if job is None:
            return []
        if isinstance(notice, Adopted):
            job.slot.blocks = list(notice.blocks)
            self._came_by(job.path)
        if first.finish_reason is not None:  # its pull drains by itself
            self._forget(job, now)
            return [echo(job, first)]
        del self._by_pull[notice.pull]
        job.pull = None
        if first.token.index != job.start.emitted or first.token.token_id >= self._vocab_size:
            self.ignored["wrong_first_token"] += 1
            self._forget(job, now)
            return [failed(job, Reason.INTERNAL, resumable=True)]
        job.first = first
        return [] if job.admitted is None else self._run(job, now)

    # ---- slots ----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Action]:
        """Growth, preemption and admission, until nothing more can move. After every event."""
        actions: list[Action] = []
        while True:
            if not self._flights:
                coming = sum(map(len, self._draining_blocks.values()))
                actions += self._preempt(self.scheduler.grow(coming), now)
            if not self.scheduler.waiting:
                return actions
            if (slot := self.scheduler.admit()) is not None:
                actions += self._admitted(self._by_slot[slot.id], now)
                continue
            if not (victims := self.scheduler.in_the_way()):
                return actions
            actions += self._preempt(victims, now)

    def _preempt(self, victims: Iterable[Slot], now: float) -> list[Action]:
        jobs = [self._by_slot[victim.id] for victim in victims]
        for job in jobs:
            self._forget(job, now)
        return [failed(job, Reason.OUT_OF_BLOCKS, resumable=True) for job in jobs]

    def _admitted(self, job: Job, now: float) -> list[Action]:
        job.admitted = now
        if job.slot.lent:
            return [] if job.first is None else self._run(job, now)
        assert job.pull is not None, f"{job.key} arrives without a pull"
        self.inbox.hold(job.pull, range(job.slot.held))
        return self._bind(job, now)

    def _run(self, job: Job, now: float) -> list[Action]:
        """The prompt is in place: the slot joins the very next step, and its router learns that it runs here."""
        slot, first = job.slot, job.first
        assert first is not None, f"{job.key} runs without token 0"
        self.scheduler.run(slot)
        job.running_since = now
        if slot.lent:  # the prefill has named them
            job.digest = last_name(self.pool, slot.blocks, job.digest, job.start.token_ids, self.layout.block_size)
        for block, name in zip(slot.blocks[slot.held :], slot.hashes[slot.held :], strict=False):
            self.pool.name(block, name)
        job.first = None
        job.accept(first.token)
        job.runs(self._eos, self._depth)
        return [echo(job, first)]

    # ---- a step ---------------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> Batch | None:
        """One row per slot with credit and room; None while `depth` steps are in flight or nothing can run."""
        if len(self._flights) >= self._depth:
            return None
        if self._depth > 1 and not self._reach_ahead():
            return None
        batch, jobs, size = Batch(), list[Job](), self.layout.block_size
        for slot in self.scheduler.running:
            job = self._by_slot[slot.id]
            if (row := job.row(len(slot.blocks) * size)) is None:
                continue
            batch.rows.append(row)
            jobs.append(job)
            if slot.fresh:
                batch.zero_blocks += slot.fresh
                slot.fresh = []
        if not jobs:
            return None
        self._flights.append(Flight(jobs))
        return batch

    def _reach_ahead(self) -> bool:
        """Gives each slot the blocks of the steps that start before the next one is reported, while there are any.

        False if the steps in flight have to end first: only then may somebody give way to a slot that has no block.
        """
        size, most = self.layout.block_size, 2 * (self._depth - 1)
        for slot in self.scheduler.running:
            if slot.length + most <= len(slot.blocks) * size or not slot.credit:
                continue
            job = self._by_slot[slot.id]
            whole = len(job.prompt) + (job.start.params.max_tokens or self.config.max_model_len)
            wanted = min(slot.length + job.ahead + self._depth - 1, whole, self.config.max_model_len)
            self.scheduler.reach(slot, wanted)
            if self._flights and not job.ahead and not self.scheduler.fits(slot):
                return False
        return True

    def on_step(self, output: StepOutput, now: float) -> list[Action]:
        """One StepBatch per session; a last token and its Finish share it."""
        flight = self._flights.popleft()
        self._steps += 1
        self._step_seconds = _average(self._step_seconds, output.seconds)
        rows: defaultdict[int, list[Row]] = defaultdict(list)
        finishes: defaultdict[int, list[Finish]] = defaultdict(list)
        failures: list[Action] = []
        size = self.layout.block_size
        for job, token in zip(flight.jobs, output.tokens, strict=True):
            job.ahead -= 1
            if job.over:
                continue  # ended while the step ran
            if token is None:
                failures.append(failed(job, Reason.INTERNAL, resumable=False))
                self._forget(job, now)
                continue
            slot, token_id = job.slot, token.token_id
            if slot.length % size == 0:
                self._name_full_block(job)
            rows[job.session].append(_new(Row, (job.start.key, token)))
            if token.index + 1 < job.until_index and token_id not in job.ends:  # as most do, it goes on, with credit
                job.output.append(token_id)
                slot.length += 1
                continue
            reason, stop_token_id = finish_of(token_id, token.index, job.start.params, self._eos)
            if reason is None:
                job.accept(token)
                continue
            finishes[job.session].append(Finish(job.start.key, reason, stop_token_id, job.times(now)))
            self._forget(job, now)
        self.pool.give(flight.blocks)
        batches: list[Action] = [
            ToRouter(session, StepBatch(self._steps, tuple(mine), tuple(finishes[session])))
            for session, mine in rows.items()
        ]
        return batches + failures + self._settle(now)

    def step_failed(self, facts: dict[str, str], now: float) -> list[Action]:
        """A step raised: the requests in flight fail, all others go on. Nothing that was launched runs any more."""
        flights = list(self._flights)
        self._flights.clear()
        actions: list[Action] = []
        for job in dict.fromkeys(job for flight in flights for job in flight.jobs):
            job.ahead = 0
            if not job.over:
                actions.append(failed(job, Reason.INTERNAL, resumable=False, facts=facts))
                self._forget(job, now)
        for flight in flights:
            self.pool.give(flight.blocks)
        return actions + self._settle(now)

    def _name_full_block(self, job: Job) -> None:
        """The step wrote position length - 1, a block's last: it stays cached under its chain's name."""
        size, length = self.layout.block_size, job.slot.length
        job.digest = block_digest(job.digest, job.tokens(length - size, length))
        self.pool.name(job.slot.blocks[length // size - 1], job.digest)

    # ---- a job ends -----------------------------------------------------------------------------------------------

    def _cancel(self, key: JobKey, now: float) -> list[Action]:
        if (job := self._jobs.get(key)) is None:
            self.ignored["unknown_cancel"] += 1
            self._tombstones.add(key, now)  # a start that arrives late must not begin
            return []
        return self._end(job, now) + self._settle(now)

    def _end(self, job: Job, now: float) -> list[Action]:
        """Ends a job that its pull does not know to be over."""
        pull = job.pull
        self._forget(job, now)
        return [] if pull is None else self._absorb(self.inbox.cancel(pull, now), now)

    def _forget(self, job: Job, now: float) -> None:
        """The job is over. Its blocks go back when neither a copy nor the step in flight can write into them."""
        job.over = True
        del self._jobs[job.key], self._by_slot[job.slot.id]
        self._tombstones.add(job.key, now)
        self.scheduler.remove(job.slot)
        held, blocks = job.slot.held, job.slot.hand_over()
        if job.pull is not None:
            del self._by_pull[job.pull]
            self.pool.give(blocks[:held])
            if blocks[held:]:
                self._draining_blocks[job.pull] = blocks[held:]
        elif job.ahead:
            next(flight for flight in reversed(self._flights) if job in flight.jobs).blocks += blocks
        else:
            self.pool.give(blocks)

    # ---- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Deadlines, hung copies, the end of grace; about four times a second, whether or not there is traffic."""
        actions: list[Action] = []
        for job in list(self._jobs.values()):
            if job.deadline_at <= now:
                actions.append(failed(job, Reason.DEADLINE, resumable=False))
                actions += self._end(job, now)
        actions += self._absorb(self.inbox.tick(now), now)
        self._park(now)
        if self.draining and now >= self._drain_until:
            for job in list(self._jobs.values()):
                actions.append(failed(job, Reason.DRAINING, resumable=True))
                actions += self._end(job, now)
        self._tombstones.expire(now)
        actions += self._settle(now)
        load = self.load()
        return actions + [self._load_for(s) for s in self.sessions if self._sent_load.get(s) != load]

    def _park(self, now: float) -> None:
        for slot in self.scheduler.running:
            if slot.credit:
                continue
            job = self._by_slot[slot.id]
            if job.no_credit_since is None:
                job.no_credit_since = now
            slot.parked = now - job.no_credit_since >= CREDIT_PATIENCE

    def drain(self, grace: float, now: float) -> list[Action]:
        """Refuses what is new and runs on; what is left after `grace` is handed back to its routers."""
        self._drain_until = min(self._drain_until, now + grace) if self.draining else now + grace
        self.draining = True
        return [self._load_for(session) for session in self.sessions]

    # ---- what others may know -------------------------------------------------------------------------------------

    @property
    def stalled(self) -> bool:
        return self.scheduler.stalled

    @property
    def promised(self) -> int:
        """Blocks of the pool that nobody else may take: promises, and the headroom of what runs."""
        return self.scheduler.promised + self.scheduler.headroom * len(self.scheduler.running)

    @property
    def idle(self) -> bool:
        """Nothing waits, arrives, runs or drains."""
        return not self._jobs and not self._draining_blocks and not self._flights

    def load(self) -> WorkerLoad:
        scheduler = self.scheduler
        coming = scheduler.waiting + scheduler.arriving
        return WorkerLoad(
            running=len(scheduler.running),
            waiting=len(coming),
            waiting_tokens=sum(slot.num_tokens for slot in coming),
            free_blocks=self.pool.available,
            leased_blocks=scheduler.promised,
            step_seconds=self._step_seconds,
            draining=self.draining,
            pulled_blocks=self._pulled_blocks,
            kv_path=", ".join(self._kv_paths),
            kv_paths=self.kv_paths(),
            refuses=self.refuses(),
            cached_blocks=self.pool.cached,
        )

    def _load_for(self, session: int) -> ToRouter:
        load = self._sent_load[session] = self.load()
        return ToRouter(session, load)

    def holders(self) -> list[list[int]]:
        """Every reference that this stage holds, for the pool's audit; a shared pool is audited over both stages'."""
        slots = [[block for block in job.slot.blocks if block != UNBOUND] for job in self._jobs.values()]
        return [*slots, *self._draining_blocks.values(), *(flight.blocks for flight in self._flights)]

    def audit(self, others: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError if a block, a slot or a promise is unaccounted for."""
        self.pool.audit([*self.holders(), *others])
        scheduler = self.scheduler
        slots = [slot.id for group in (scheduler.waiting, scheduler.arriving, scheduler.running) for slot in group]
        assert sorted(slots) == sorted(self._by_slot), "a slot has no job, or is in two states"
        assert len(self._by_slot) == len(self._jobs), "a job has no slot"
        assert {job.pull for job in self._jobs.values() if job.pull is not None} == set(self._by_pull), "a pull is lost"
        assert scheduler.unpromised >= 0, f"{scheduler.promised} blocks promised, {self.pool.available} available"
        assert sorted(self.inbox.draining) == sorted(b for d in self._draining_blocks.values() for b in d), "draining"
        assert all(key[0] in self.sessions for key in self._jobs), "a job outlived its session"

    def ledger(self) -> dict[str, int]:
        """Each block once, by its strongest holder; the sum is the pool. "other": the prefill on the same pool."""
        draining = {block for blocks in self._draining_blocks.values() for block in blocks}
        draining |= {block for flight in self._flights for block in flight.blocks}
        groups: dict[str, set[int]] = {"draining": draining, "active": set(), "verified": set(), "copying": set()}
        groups["bound"] = set()
        for job in self._jobs.values():
            for position, block in enumerate(job.slot.blocks):
                if block != UNBOUND:
                    groups[self._state(job, position)].add(block)
        counts, seen = self.pool.ledger(), set[int]()
        for blocks in groups.values():
            blocks -= seen
            seen |= blocks
        sizes = {name: len(blocks) for name, blocks in groups.items()}
        return {"free": counts["free"], "cached": counts["cached"], **sizes, "other": counts["referenced"] - len(seen)}

    def _state(self, job: Job, position: int) -> str:
        if job.running_since is not None:
            return "active"
        if job.slot.lent:
            return "bound"  # ours, and waiting for its turn
        return "verified" if position < job.slot.held or position in job.landed else "copying"


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + 0.2 * (new - old)
