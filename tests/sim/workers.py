"""The two kinds of worker in the simulator: the real cores, a FakeRunner, and a driver on virtual time.

The drivers do what the servicers do: carry out actions in order, one step at a time, a timer. Copies are harsher
than any real transport's: bytes are written a while after their destination was asked for, and a stream counts as
closed only when its last write is done. A restarted worker finds garbage in its memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decode_service.decoder import Decoder
from engine.batch import Batch, StepOutput
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner
from engine.messages import BlockHandle, Heartbeat, Node, RouterHello, WorkerHello
from kvtransfer.actions import (
    Action,
    ClosePull,
    CloseStream,
    CopyBlocks,
    OpenPull,
    SendBlock,
    ToOwner,
    ToPuller,
    ToRouter,
)
from prefill_service.prefiller import Prefiller
from router.workers import Role
from tests.sim.network import End, Process, Stream
from tests.sim.violation import Violation

if TYPE_CHECKING:
    from tests.sim.world import World

BLOCK_SIZE = 16
VOCAB = 1000
POISON = VOCAB - 1  # a prompt that begins with it takes down whoever decodes it, if the world has poison
EOS = frozenset({7, 77, 777})


class WorkerProcess(Process):
    """What both kinds share: sessions, steps, ticks."""

    role: Role
    core: Prefiller | Decoder

    def __init__(self, world: World, name: str, num_blocks: int) -> None:
        super().__init__(name, world.clock)
        self.world = world
        self.rng: random.Random = world.rng
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=self.rng.choice((2, 3, 4, 8)),
            max_num_batched_tokens=self.rng.choice((16, 24, 48, 200)),
            max_model_len=400,
        )
        self.runner = FakeRunner(BLOCK_SIZE, num_blocks, VOCAB, EOS)
        self.forever_dead = False

    def start(self) -> None:
        self.born()
        incarnation = self.rng.getrandbits(63)
        self.node = Node(self.name, incarnation, self.name)
        self.runner.cache.data[:] = self.rng.randbytes(len(self.runner.cache.data))  # whatever memory holds
        self.pool = BlockPool(self.config.num_blocks)
        self.sessions: dict[int, Stream] = {}
        self.stepping = False
        self._events = 0
        self.make_core()
        self.post(self.rng.random() * self.world.tuning.tick, self.tick)

    def make_core(self) -> None:
        raise NotImplementedError

    @property
    def hello(self) -> WorkerHello:
        return WorkerHello(
            self.node, self.runner.layout, self.config.num_blocks, self.config.max_num_seqs, self.config.max_model_len
        )

    # ---- sessions -------------------------------------------------------------------------------------------

    def session_message(self, stream: Stream, session: int, message: Any) -> None:
        if isinstance(message, RouterHello):
            self.sessions[session] = stream
            stream.send(1, self.hello)
            self.act(self.core.attach(session, message, self.clock.now))
        else:
            self.act(self.core.on_command(session, message, self.clock.now))

    def session_closed(self, session: int) -> None:
        self.sessions.pop(session, None)
        self.act(self.core.detach(session, self.clock.now))

    # ---- steps and time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.act(self.core.tick(self.clock.now))
        self.beat()
        self.post(self.world.tuning.tick, self.tick)

    def beat(self) -> None:
        """Heartbeats on its Pull streams."""

    def act(self, actions: Sequence[Action]) -> None:
        """Carries the actions out, then starts a step if there is one to start."""
        for action in actions:
            self.carry(action)
        self._events += 1
        if self._events % self.world.tuning.audit_every == 0:
            self.core.audit()
        if not self.stepping and (batch := self.core.next_batch(self.clock.now)) is not None:
            self.stepping = True
            seconds = self.rng.uniform(0.3, 1.0) * self.world.tuning.step_seconds
            before = self.rng.random() * seconds  # the device writes at some moment in between
            self.post(before, lambda: self.compute(batch, seconds - before))

    def compute(self, batch: Batch, rest: float) -> None:
        for row in batch.rows:
            for block in row.blocks[row.start // BLOCK_SIZE :]:
                if self.pool.refs(block) == 0:
                    raise Violation(f"{self.name}: a step writes into block {block}, which nobody holds")
        if any(self.world.poisonous(row.sample.prompt) for row in batch.rows if row.sample is not None):
            self.world.faults.crash(self)
            return
        output = self.runner.step(batch)
        output.seconds = rest
        self.post(rest, lambda: self.step_over(output))

    def step_over(self, output: StepOutput) -> None:
        self.stepping = False
        self.act(self.core.on_step(output, self.clock.now))

    def carry(self, action: Action) -> None:
        assert isinstance(action, ToRouter), f"{self.name} cannot carry out {action}"
        if (stream := self.sessions.get(action.session)) is not None:
            stream.send(1, action.event)


class _OwnerPull:
    """One Pull at its owner: what waits to be written to the stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.queue: deque[ToPuller | SendBlock | ClosePull] = deque()
        self.reading = False
        self.closing = False


class PrefillProcess(WorkerProcess):
    role = Role.PREFILL

    def make_core(self) -> None:
        self.pulls: dict[int, _OwnerPull] = {}
        self.core = self.prefiller = Prefiller(
            self.node, self.runner.layout, self.config, self.pool, vocab_size=VOCAB, eos_token_ids=EOS,
            rng=random.Random(self.rng.getrandbits(64)), ticket_ttl=self.world.tuning.ticket_ttl,
            digests=self.world.digests,
        )  # fmt: skip

    def pull_opened(self, pull: int, stream: Stream) -> None:
        self.pulls[pull] = _OwnerPull(stream)

    def pull_message(self, pull: int, message: Any) -> None:
        self.act(self.prefiller.pull_message(pull, message, self.clock.now))

    def pull_closed(self, pull: int) -> None:
        if self.pulls.pop(pull, None) is not None:
            self.act(self.prefiller.pull_closed(pull, self.clock.now))

    def beat(self) -> None:
        for owner in self.pulls.values():
            owner.stream.send(1, Heartbeat(0))

    def carry(self, action: Action) -> None:
        if isinstance(action, ToPuller | SendBlock | ClosePull):
            if (owner := self.pulls.get(action.pull)) is not None:
                owner.queue.append(action)
                owner.closing = owner.closing or isinstance(action, ClosePull)
                if not owner.reading:
                    self.pump(action.pull, owner)
        else:
            super().carry(action)

    def pump(self, pull: int, owner: _OwnerPull) -> None:
        while owner.queue and not owner.reading:
            action = owner.queue.popleft()
            if isinstance(action, ToPuller):
                owner.stream.send(1, action.event)
            elif isinstance(action, ClosePull):
                owner.stream.close(1)
                self.post(0.0, lambda: self.pull_closed(pull))
            elif not owner.closing:
                owner.reading = True
                self.post(
                    self.rng.random() * self.world.tuning.copy_seconds, lambda a=action: self.read(pull, owner, a)
                )

    def read(self, pull: int, owner: _OwnerPull, action: SendBlock) -> None:
        owner.reading = False
        if pull in self.pulls and not owner.closing:
            data = self.world.faults.bytes_of(self.runner.read_block(action.handle.id))
            owner.stream.send(1, (action.handle.position, data))
            self.act(self.prefiller.sent(pull, action.handle.position, self.clock.now))
        self.pump(pull, owner)


class _PullerPull:
    """One Pull at its puller: the writes that are under way."""

    def __init__(self, owner: PrefillProcess | None) -> None:
        self.owner = owner
        self.stream: Stream | None = None
        self.writing: set[int] = set()  # positions
        self.closed = False


class DecodeProcess(WorkerProcess):
    role = Role.DECODE

    def make_core(self) -> None:
        self.pulls: dict[int, _PullerPull] = {}
        self.routing = random.Random(self.node.incarnation)
        self.core = self.decoder = Decoder(
            self.node, self.runner.layout, self.config, self.pool,
            vocab_size=self.runner.vocab_size, eos_token_ids=EOS, transport=self.world.paths[0],
            headroom=self.world.tuning.headroom, progress_seconds=self.world.tuning.progress_seconds,
        )  # fmt: skip

    def carry(self, action: Action) -> None:
        match action:
            case OpenPull():
                self.open(action)
            case ToOwner():
                state = self.pulls.get(action.pull)
                if state is not None and state.stream is not None:
                    state.stream.send(0, action.message)
                    self.world.faults.may_break(state.stream)
            case CopyBlocks():
                state = self.pulls.get(action.pull)
                if state is not None and not state.closed:
                    for handle in action.handles:
                        self.copy(action.pull, state, handle)
            case CloseStream():
                state = self.pulls.get(action.pull)
                if state is not None:
                    if state.stream is not None:
                        state.stream.close(0)
                    self.post(0.0, lambda: self.stream_over(action.pull, state))
            case _:
                super().carry(action)

    def open(self, action: OpenPull) -> None:
        owner = self.world.processes[action.address]
        assert isinstance(owner, PrefillProcess)
        if not owner.alive or self.world.network.blocked(self, owner):
            state = self.pulls[action.pull] = _PullerPull(None)
            self.post(self.rng.uniform(0.01, 1.0), lambda: self.stream_over(action.pull, state))
            return
        state = self.pulls[action.pull] = _PullerPull(owner)
        transport = self.routing.choice(self.world.paths)  # as pairing finds them, which may change
        self.decoder.reroute(action.pull, transport, transport)
        at_owner = self.world.next_pull()
        near = End(
            self, lambda m: self.pull_message(action.pull, state, m), lambda: self.stream_over(action.pull, state)
        )
        far = End(owner, lambda m: owner.pull_message(at_owner, m), lambda: owner.pull_closed(at_owner))
        state.stream = self.world.network.open(near, far)
        owner.pull_opened(at_owner, state.stream)
        state.stream.send(0, replace(action.message, transport=transport))

    def beat(self) -> None:
        for state in self.pulls.values():
            if state.stream is not None:
                state.stream.send(0, Heartbeat(0))

    def pull_message(self, pull: int, state: _PullerPull, message: Any) -> None:
        if isinstance(message, tuple):
            self.data(pull, state, *message)
        else:
            self.act(self.decoder.pull_event(pull, message, self.clock.now))

    def data(self, pull: int, state: _PullerPull, position: int, data: bytes) -> None:
        block = self.decoder.destination(pull, position)
        if block is None or position in state.writing:  # not asked for, or said twice
            self.act(self.decoder.copy_failed(pull, position, self.clock.now))
            return
        state.writing.add(position)
        self.post(self.world.faults.write_seconds(), lambda: self.written(pull, state, position, block, data))

    def copy(self, pull: int, state: _PullerPull, handle: BlockHandle) -> None:
        """One-sided: reads whatever is in the owner's memory by then, whether the owner lives, died or began anew."""
        block = self.decoder.destination(pull, handle.position)
        if block is None:
            return
        state.writing.add(handle.position)
        owner = state.owner
        assert owner is not None, f"pull {pull} copies from nobody"

        def read() -> None:
            data = self.world.faults.bytes_of(owner.runner.read_block(handle.id))
            seconds = self.world.faults.write_seconds()
            self.post(seconds, lambda: self.written(pull, state, handle.position, block, data))

        self.post(self.rng.random() * self.world.tuning.copy_seconds, read)

    def written(self, pull: int, state: _PullerPull, position: int, block: int, data: bytes) -> None:
        """The write lands whatever has happened meanwhile; only then may its stream count as closed."""
        if self.pool.refs(block) == 0:
            raise Violation(f"{self.name}: a copy writes into block {block}, which nobody holds")
        self.runner.write_block(block, data)
        state.writing.discard(position)
        if self.decoder.destination(pull, position) is not None:
            tokens = self.decoder.block_tokens(pull, position)
            digest = self.runner.cache.digest(block, position, tokens) if self.world.digests else 0
            self.act(self.decoder.copied(pull, {position: digest}, self.clock.now))
        if state.closed:
            self.stream_over(pull, state)

    def stream_over(self, pull: int, state: _PullerPull) -> None:
        state.closed = True
        if not state.writing and self.pulls.pop(pull, None) is not None:
            self.act(self.decoder.pull_stream_closed(pull, self.clock.now))
