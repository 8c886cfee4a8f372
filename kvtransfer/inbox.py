"""The puller's side of the hand-off, sans-IO: which positions are bound, landed and validated on each Pull.

An event and a time go in, actions and notices come out. A position counts only after the copy: the digest of
the bytes in place must equal the announced one, and of bytes that were copied one-sidedly the owner has to say
afterwards that the block was still the announced one. Destination blocks of a pull that is over stay out of use until
no copy can write into them, however long that takes; then Drained names them, once. Timeouts only end a
pull. Nothing that a peer says raises: an odd message is counted in `ignored` or fails its own pull.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.messages import (
    BlockHandle,
    BlocksSealed,
    BlocksValid,
    Failed,
    FirstToken,
    Heartbeat,
    PullCopied,
    PullDone,
    PullEvent,
    PullOpen,
    PullOpened,
    PullWant,
    Reason,
    RequestKey,
    Ticket,
)
from kvtransfer.actions import (
    Action,
    Adopted,
    Announced,
    CloseStream,
    CopyBlocks,
    Drained,
    Landed,
    OpenPull,
    PullFailed,
    Ready,
    ToOwner,
)
from kvtransfer.outbox import WINDOW_BYTES
from kvtransfer.paths import ONE_SIDED

PROGRESS_SECONDS = 10.0


class _Phase(enum.Enum):
    OPEN = enum.auto()
    TAKING = enum.auto()  # local: PullDone is said, the blocks are about to move
    OVER = enum.auto()  # delivered, failed or cancelled: only the end of the stream is missing


@dataclass(slots=True)
class _Pull:
    ticket: Ticket
    key: RequestKey
    transport: str
    held: frozenset[int]  # positions that the decoder has already
    progress_at: float  # the last landed block or event
    heard_at: float  # the last message of any kind
    phase: _Phase = _Phase.OPEN
    announced: dict[int, BlockHandle] = field(default_factory=dict)
    bound: dict[int, int] = field(default_factory=dict)  # position -> destination block
    both: int = 0  # positions that are announced and bound: what is copied, or being copied, or about to be
    copied: set[int] = field(default_factory=set)  # one-sided: in place, the owner's word is missing
    unasked: list[BlockHandle] = field(default_factory=list)  # of those, the ones it was not asked about
    landed: set[int] = field(default_factory=set)
    first: FirstToken | None = None
    arriving: bool = False  # bind() was called: its progress deadline runs
    draining: bool = False  # OVER, and its blocks wait for the end of the stream

    @property
    def complete(self) -> bool:
        if self.transport == "local":
            return len(self.announced) == self.ticket.num_blocks
        return len(self.landed) + len(self.held) == self.ticket.num_blocks

    @property
    def copying(self) -> bool:
        """A copy may still write into a bound block."""
        return len(self.landed) + len(self.copied) < len(self.bound)

    @property
    def one_sided(self) -> bool:
        return self.transport in ONE_SIDED

    def awaits(self, position: int) -> bool:
        """Its bytes may still be written into the block that is bound to it."""
        placed = position in self.landed or position in self.copied
        return self.phase is _Phase.OPEN and position in self.bound and not placed


class Inbox:
    def __init__(
        self, layout_digest: bytes, *, window_bytes: int = WINDOW_BYTES, progress_seconds: float = PROGRESS_SECONDS
    ) -> None:
        self.layout_digest = layout_digest
        self.window_bytes = window_bytes
        self.progress_seconds = progress_seconds
        self.ignored: Counter[str] = Counter()
        self.failed: Counter[Reason] = Counter()
        self._pulls: dict[int, _Pull] = {}
        self._last_pull = 0

    def __len__(self) -> int:
        """Pulls whose stream is not over."""
        return len(self._pulls)

    @property
    def draining(self) -> list[int]:
        """Blocks that wait for their Drained. Their references are the decoder's until then."""
        return [block for pull in self._pulls.values() if pull.draining for block in pull.bound.values()]

    def destination(self, pull: int, position: int) -> int | None:
        """The block into which this position's bytes may be written now: asked before every write."""
        state = self._pulls.get(pull)
        return state.bound[position] if state is not None and state.awaits(position) else None

    # ---- the decoder's calls ----------------------------------------------------------------------------------

    def open(
        self,
        ticket: Ticket,
        key: RequestKey,
        held_positions: Collection[int],
        transport: str,
        now: float,
        request_id: str = "",
    ) -> tuple[int, list[Action]]:
        """A new Pull. `held_positions` are referenced by the decoder already and never asked for."""
        self._last_pull += 1
        pull = self._last_pull
        held = frozenset(held_positions)
        assert all(0 <= position < ticket.num_blocks for position in held), f"held {sorted(held)}"
        assert not held or transport != "local", "a local pull takes every block from its owner"
        self._pulls[pull] = _Pull(ticket, key, transport, held, now, now)
        message = PullOpen(
            ticket.id, key, ticket.owner.incarnation, transport, self.layout_digest, self.window_bytes, request_id
        )
        return pull, [OpenPull(pull, ticket.owner.address, message)]

    def hold(self, pull: int, positions: Collection[int]) -> None:
        """The decoder references its own blocks for these positions from now on: they are not asked for."""
        state = self._pulls.get(pull)
        assert state is not None and state.phase is _Phase.OPEN, f"hold() on pull {pull}, which is over"
        assert not positions or state.transport != "local", "a local pull takes every block from its owner"
        for position in positions:
            assert 0 <= position < state.ticket.num_blocks, f"held position {position} of {state.ticket.num_blocks}"
            assert position not in state.bound, f"position {position} is bound already"
        state.held |= frozenset(positions)

    def bind(self, pull: int, destinations: Mapping[int, int], now: float) -> list[Action]:
        """Destination blocks for these positions; their bytes may arrive from now on. Empty: the slot is arriving."""
        state = self._pulls.get(pull)
        assert state is not None and state.phase is _Phase.OPEN, f"bind() on pull {pull}, which is over"
        for position in destinations:
            assert 0 <= position < state.ticket.num_blocks, f"bound position {position} of {state.ticket.num_blocks}"
        known = destinations.keys() & state.bound.keys() | destinations.keys() & state.held
        assert not known, f"positions {sorted(known)} are bound twice"
        state.bound.update(destinations)
        state.both += len(state.announced.keys() & destinations.keys())
        state.arriving = True
        state.progress_at = state.heard_at = now
        return [*self._fetch(pull, state, sorted(destinations)), *self._ready(pull, state)]

    def reroute(self, pull: int, transport: str) -> None:
        """The driver knows the path to this pull's owner. Its stream is not open yet."""
        state = self._live(pull, "reroute")
        if state is not None:
            assert state.transport != "local" and not state.announced, f"pull {pull} goes by {state.transport} already"
            state.transport = transport

    def no_path(self, pull: int, facts: Mapping[str, str]) -> list[Action]:
        """The driver has no path to this pull's owner, and will open no stream."""
        state = self._live(pull, "no_path")
        return self._fail(pull, state, Reason.COPY_FAILED, facts=facts) if state else []

    def cancel(self, pull: int, now: float) -> list[Action]:
        """The decoder wants it no more; Drained follows, PullFailed does not."""
        state = self._live(pull, "cancel")
        return self._end(pull, state) if state else []

    def adopted(self, pull: int, blocks: Sequence[int], now: float) -> list[Action]:
        """`local`: the references moved here. Too late, they come straight back as Drained."""
        state = self._pulls.get(pull)
        if state is None or state.phase is not _Phase.TAKING or state.first is None:
            self.ignored["adopted"] += 1
            return [Drained(pull, tuple(blocks))]
        state.phase = _Phase.OVER
        return [Adopted(pull, tuple(blocks), state.first)]

    def tick(self, now: float) -> list[Action]:
        """Arriving pulls without progress fail: a wanted block does not land, or the owner is silent."""
        actions: list[Action] = []
        for pull, state in list(self._pulls.items()):
            if state.phase is not _Phase.OPEN or not state.arriving:
                continue
            owed = any(position not in state.landed for position in state.bound if position in state.announced)
            if now >= (state.progress_at if owed else state.heard_at) + self.progress_seconds:
                actions += self._fail(pull, state, Reason.COPY_FAILED)
        return actions

    # ---- the driver's calls -----------------------------------------------------------------------------------

    def message(self, pull: int, event: PullEvent, now: float) -> list[Action]:
        state = self._live(pull, "message")
        if state is None:
            return []
        state.heard_at = now
        if isinstance(event, Heartbeat):
            return []
        state.progress_at = now
        match event:
            case PullOpened():
                matches = event.layout_digest == self.layout_digest
                return [] if matches else self._fail(pull, state, Reason.LAYOUT_MISMATCH)
            case BlocksSealed():
                return self._sealed(pull, state, event.blocks)
            case FirstToken():
                return self._first(pull, state, event)
            case Failed():
                return self._fail(pull, state, event.reason)
            case BlocksValid():
                return self._valid(pull, state, event)

    def copied(self, pull: int, digests: Mapping[int, int], now: float) -> list[Action]:
        """All bytes of these positions are in place; each one's digest was computed from them afterwards."""
        state = self._pulls.get(pull)
        handles: list[BlockHandle] = []
        for position, digest in digests.items():
            if state is None or not state.awaits(position):
                self.ignored["copied"] += 1
                continue
            handle = state.announced.get(position)
            if handle is None or handle.digest != digest:
                return self._fail(pull, state, Reason.COPY_FAILED)
            handles.append(handle)
        if state is None or not handles:
            return []
        state.progress_at = state.heard_at = now
        positions = [handle.position for handle in handles]
        if state.one_sided:
            state.copied.update(positions)
            state.unasked += handles
            return self._ask(pull, state)
        state.landed.update(positions)
        return [Landed(pull, positions), *self._ready(pull, state)]

    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]:
        """Bytes came that are corrupt, out of bounds or not asked for."""
        state = self._live(pull, "copy_failed")
        return self._fail(pull, state, Reason.COPY_FAILED) if state else []

    def stream_closed(self, pull: int, now: float) -> list[Action]:
        """The stream is over and nothing that came with it can write any more: the last word on this pull."""
        state = self._pulls.get(pull)
        if state is None:
            self.ignored["stream_closed"] += 1
            return []
        actions: list[Action] = []
        if state.phase is not _Phase.OVER:
            actions += self._fail(pull, state, Reason.COPY_FAILED, close=False)
        del self._pulls[pull]
        if state.draining:
            actions.append(Drained(pull, tuple(state.bound.values())))
        return actions

    # ---- inside -----------------------------------------------------------------------------------------------

    def _live(self, pull: int, what: str) -> _Pull | None:
        state = self._pulls.get(pull)
        if state is None or state.phase is _Phase.OVER:
            self.ignored[what] += 1
            return None
        return state

    def _sealed(self, pull: int, state: _Pull, blocks: Sequence[BlockHandle]) -> list[Action]:
        announced, total = state.announced, state.ticket.num_blocks
        new: dict[int, BlockHandle] = {}
        for handle in blocks:
            position = handle.position
            known = announced.get(position) or new.setdefault(position, handle)
            if not 0 <= position < total or known != handle:
                return self._fail(pull, state, Reason.STALE_TICKET)
        if len(new) < len(blocks):
            self.ignored["block announced twice"] += len(blocks) - len(new)
        announced.update(new)
        state.both += len(state.bound.keys() & new.keys())
        fresh = [position for position in new if position not in state.held]
        if state.transport == "local":
            return self._ready(pull, state)
        early = [position for position in fresh if position in state.bound] if state.one_sided else []
        return [*self._fetch(pull, state, early), *([Announced(pull, tuple(fresh))] if fresh else [])]

    def _fetch(self, pull: int, state: _Pull, positions: Sequence[int]) -> list[Action]:
        """Asks for the bytes, or copies those that may be read: an owner seals a block before it announces it."""
        if not positions:
            return []
        if not state.one_sided:
            return [ToOwner(pull, PullWant(tuple(positions)))]
        handles = [state.announced[position] for position in positions if position in state.announced]
        return [CopyBlocks(pull, handles)] if handles else []

    def _ask(self, pull: int, state: _Pull) -> list[Action]:
        """One question for all blocks, once no more copies are under way."""
        if len(state.copied) + len(state.landed) < state.both:
            return []
        handles, state.unasked = tuple(state.unasked), []
        return [ToOwner(pull, PullCopied(handles))]

    def _valid(self, pull: int, state: _Pull, event: BlocksValid) -> list[Action]:
        waiting = state.copied - {handle.position for handle in state.unasked}
        if not waiting.isdisjoint(event.stale_positions):
            return self._fail(pull, state, Reason.COPY_FAILED)
        valid = [position for position in dict.fromkeys(event.positions) if position in waiting]
        if not valid:
            self.ignored["BlocksValid"] += 1  # nothing that was asked
            return []
        state.copied.difference_update(valid)
        state.landed.update(valid)
        return [Landed(pull, valid), *self._ready(pull, state)]

    def _first(self, pull: int, state: _Pull, first: FirstToken) -> list[Action]:
        if first.key[:2] != state.key[:2]:
            return self._fail(pull, state, Reason.STALE_TICKET)
        if state.first is not None:
            self.ignored["second FirstToken"] += 1
            return []
        state.first = first
        return self._ready(pull, state)

    def _ready(self, pull: int, state: _Pull) -> list[Action]:
        """Says PullDone as soon as nothing is missing. Blocks are not waited for once the request is over."""
        first = state.first
        if first is None or state.phase is not _Phase.OPEN:
            return []
        done = ToOwner(pull, PullDone())
        if first.finish_reason is not None:
            return [done, Ready(pull, first), *self._end(pull, state)]
        if not state.complete:
            return []
        if state.transport == "local":
            state.phase = _Phase.TAKING
            return [done]
        state.phase = _Phase.OVER
        return [done, CloseStream(pull), Ready(pull, first)]

    def _fail(
        self, pull: int, state: _Pull, reason: Reason, *, close: bool = True, facts: Mapping[str, str] | None = None
    ) -> list[Action]:
        self.failed[reason] += 1
        return [PullFailed(pull, reason, facts or {}), *self._end(pull, state, close=close, reason=reason)]

    def _end(self, pull: int, state: _Pull, *, close: bool = True, reason: Reason | None = None) -> list[Action]:
        """No write is allowed from here on. Blocks come back now if no copy can be under way, else with the stream."""
        state.phase = _Phase.OVER
        actions: list[Action] = [CloseStream(pull, reason)] if close else []
        if not close or state.copying:
            state.draining = True
        else:
            actions.append(Drained(pull, tuple(state.bound.values())))
        return actions
