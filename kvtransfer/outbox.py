"""The owner's side of the hand-off, sans-IO: tickets on blocks, and the Pulls that may take each: as many as it says.

An event and a time go in, actions come out. A ticket is freed exactly once, by one FreeTicket or HandOver
action. Everything sealed and token 0 are replayed to every Pull that opens, so a second decode worker needs
no second prefill. The outbox names blocks and never touches their bytes or references: its caller holds them.
Nothing that a peer says raises; each odd message is counted in `ignored` or refused on its own Pull.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from engine.messages import (
    BlockHandle,
    BlocksSealed,
    BlocksValid,
    Failed,
    FirstToken,
    Heartbeat,
    Node,
    PullCopied,
    PullDone,
    PullOpen,
    PullOpened,
    PullRequest,
    PullWant,
    Reason,
    RequestKey,
    Ticket,
)
from kvtransfer.actions import Action, ClosePull, FreeTicket, HandOver, SendBlock, ToPuller
from kvtransfer.paths import BETWEEN_PROCESSES

TRANSPORTS = BETWEEN_PROCESSES  # that a stream may name
WINDOW_BYTES = 8 << 20  # in flight per Pull; a puller may ask for less
_FINAL = (Reason.LAYOUT_MISMATCH, Reason.INVALID_FIELD, Reason.UNIMPLEMENTED)  # another try fails the same way


@dataclass(slots=True)
class _Pull:
    """One open stream. Positions go wanted -> queued (wanted and sealed) -> in flight -> out of all three."""

    id: int
    key: RequestKey
    transport: str
    window: int  # blocks in flight, at least one
    wanted: set[int] = field(default_factory=set)  # every position ever asked for
    queue: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Lease:
    ticket: Ticket
    key: RequestKey
    session: int
    deadline_at: float
    blocks: Sequence[int]
    generations: Sequence[int]
    unpulled_since: float
    sealed: dict[int, BlockHandle] = field(default_factory=dict)  # by position
    first: FirstToken | None = None
    pulls: dict[int, _Pull] = field(default_factory=dict)  # open, at most as many as consumers are missing
    placements: list[int] = field(default_factory=list)  # the highest that have opened a Pull, one per consumer
    delivered: int = 0

    @property
    def missing(self) -> int:
        return self.ticket.consumers - self.delivered

    @property
    def complete(self) -> bool:
        return self.first is not None and (len(self.sealed) == len(self.blocks) or self.first.finish_reason is not None)


class Outbox:
    """`block_bytes` sizes the window; where it is not given, one block at a time is in flight on each Pull."""

    def __init__(
        self,
        node: Node,
        layout_digest: bytes,
        ticket_ttl: float = 60.0,
        *,
        block_bytes: int = WINDOW_BYTES,
        transports: Collection[str] = TRANSPORTS,
    ) -> None:
        self.node = node
        self.layout_digest = layout_digest
        self.ticket_ttl = ticket_ttl
        self.block_bytes = block_bytes
        self.transports = frozenset(transports)
        self.ignored: Counter[str] = Counter()
        self.refused: Counter[Reason] = Counter()
        self._leases: dict[int, _Lease] = {}
        self._pulls: dict[int, _Lease] = {}  # open Pulls
        self._closing: set[int] = set()  # closed by us, the end of their stream not yet reported

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def leased_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values())

    # ---- the prefiller's calls --------------------------------------------------------------------------------

    def offer(
        self,
        ticket: Ticket,
        key: RequestKey,
        session: int,
        deadline_at: float,
        blocks: Sequence[int],
        generations: Sequence[int],
        now: float,
    ) -> None:
        """A lease on blocks that may still be filling. The caller keeps their references until FreeTicket."""
        assert ticket.id not in self._leases, f"ticket {ticket.id:#x} is offered twice"
        counts = (len(blocks), len(generations), ticket.num_blocks)
        assert len(set(counts)) == 1, f"ticket {ticket.id:#x}: blocks, generations and num_blocks are {counts}"
        self._leases[ticket.id] = _Lease(ticket, key, session, deadline_at, tuple(blocks), tuple(generations), now)

    def sealed(self, ticket_id: int, handles: Iterable[BlockHandle], now: float) -> list[Action]:
        """These blocks will not change any more. Cached blocks are announced in the same way."""
        lease = self._leases.get(ticket_id)
        if lease is None:
            self.ignored["sealed without a ticket"] += 1
            return []
        fresh = []
        for handle in handles:
            position = handle.position
            assert 0 <= position < len(lease.blocks), f"sealed position {position} of {len(lease.blocks)}"
            expected = (lease.blocks[position], lease.generations[position])
            assert (handle.id, handle.generation) == expected, f"{handle} is not the ticket's block, {expected}"
            assert position not in lease.sealed, f"position {position} is sealed twice"
            lease.sealed[position] = handle
            fresh.append(handle)
        actions: list[Action] = []
        for pull in lease.pulls.values() if fresh else ():
            pull.queue.extend(handle.position for handle in fresh if handle.position in pull.wanted)
            actions += [ToPuller(pull.id, BlocksSealed(tuple(fresh))), *self._send(lease, pull)]
        return actions

    def first_token(self, ticket_id: int, first: FirstToken, now: float) -> list[Action]:
        """Token 0, after the last block was sealed (or before, if it ends the request)."""
        lease = self._leases.get(ticket_id)
        if lease is None:
            self.ignored["first token without a ticket"] += 1
            return []
        assert lease.first is None, f"ticket {ticket_id:#x} has two first tokens"
        lease.first = first
        assert lease.complete, f"ticket {ticket_id:#x}: {len(lease.sealed)} of {len(lease.blocks)} blocks sealed"
        return [ToPuller(pull, first) for pull in lease.pulls]

    def revoke(self, ticket_id: int, now: float, reason: Reason = Reason.STALE_TICKET) -> list[Action]:
        """The request is cancelled, failed, or its session is over."""
        lease = self._leases.get(ticket_id)
        if lease is None:
            self.ignored["revoke without a ticket"] += 1
            return []
        return self._end(lease, reason)

    def adopt(self, ticket_id: int, key: RequestKey) -> list[Action]:
        """`local`: the puller takes the blocks themselves over. The open Pull of this key gets them or nobody does."""
        lease = self._leases.get(ticket_id)
        pull = next((pull for pull in lease.pulls.values() if pull.key == key), None) if lease else None
        if lease is None or pull is None or not lease.complete:
            self.ignored["adopt without a finished ticket"] += 1
            return []
        del self._leases[ticket_id]
        closing = [action for each in list(lease.pulls.values()) for action in self._close(lease, each)]
        return [HandOver(pull.id, ticket_id, lease.blocks), *closing]

    def tick(self, now: float) -> list[Action]:
        """The reaper: request deadlines, and tickets that nobody pulls."""
        actions: list[Action] = []
        for lease in list(self._leases.values()):
            if now >= lease.deadline_at:
                actions += self._end(lease, Reason.DEADLINE)
            elif not lease.pulls and now >= lease.unpulled_since + self.ticket_ttl:
                actions += self._end(lease, Reason.STALE_TICKET)
        return actions

    # ---- the puller's messages, through the driver ------------------------------------------------------------

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]:
        """One message of one stream. Pull ids are the driver's, never used twice, and end with pull_closed()."""
        if pull in self._closing:
            self.ignored["message after the end of a pull"] += 1
            return []
        lease = self._pulls.get(pull)
        if lease is None:
            if isinstance(message, PullOpen):
                return self._open(pull, message, now)
            self.ignored["message before PullOpen"] += 1
            return self._refuse(pull, RequestKey(0, 0), Reason.INVALID_FIELD, field="open")
        match message:
            case PullWant():
                return self._want(lease, lease.pulls[pull], message.positions, now)
            case PullCopied():
                return self._copied(lease, lease.pulls[pull], message.blocks, now)
            case PullDone():
                return self._done(lease, lease.pulls[pull], now)
            case Heartbeat():
                return []
        self.ignored["second PullOpen"] += 1
        return []

    def sent(self, pull: int, position: int) -> list[Action]:
        """The driver finished one SendBlock: the window has room for another."""
        lease = self._pulls.get(pull)
        if lease is None or position not in lease.pulls[pull].in_flight:
            self.ignored["sent without a block in flight"] += 1
            return []
        lease.pulls[pull].in_flight.discard(position)
        return self._send(lease, lease.pulls[pull])

    def pull_closed(self, pull: int, now: float) -> list[Action]:
        """The stream is over, whoever ended it. Its ticket stays for another decode worker."""
        self._closing.discard(pull)
        if (lease := self._pulls.pop(pull, None)) is not None:
            del lease.pulls[pull]
            lease.unpulled_since = now
        return []

    # ---- inside -----------------------------------------------------------------------------------------------

    def _open(self, pull: int, message: PullOpen, now: float) -> list[Action]:
        lease = self._leases.get(message.ticket)
        key = message.key
        if message.owner_incarnation != self.node.incarnation or lease is None:
            return self._refuse(pull, key, Reason.STALE_TICKET, ticket=f"{message.ticket:#x}")
        if key[:2] != lease.key[:2]:
            return self._refuse(pull, key, Reason.STALE_TICKET, attempt=str(lease.key.attempt))
        if message.layout_digest != self.layout_digest:
            return self._refuse(pull, key, Reason.LAYOUT_MISMATCH)
        # A local puller shares the pool, and its driver numbers its pulls from -1 down: no stream may claim to be one.
        if message.transport not in self.transports and not (message.transport == "local" and pull < 0):
            return self._refuse(pull, key, Reason.UNIMPLEMENTED, field="transport", transport=message.transport)
        rival = self._rival(lease, key.placement)
        if rival is not None and rival.key.placement > key.placement or self._late(lease, key.placement):
            return self._refuse(pull, key, Reason.SUPERSEDED, placement=str(max(lease.placements)))
        actions = [] if rival is None else self._close(lease, rival, Reason.SUPERSEDED)
        lease.placements = sorted({*lease.placements, key.placement})[-lease.ticket.consumers :]
        window = min(message.window_bytes or WINDOW_BYTES, WINDOW_BYTES) // max(1, self.block_bytes)
        lease.pulls[pull] = _Pull(pull, key, message.transport, max(1, window))
        self._pulls[pull] = lease
        actions.append(ToPuller(pull, PullOpened(self.layout_digest)))
        if lease.sealed:
            actions.append(ToPuller(pull, BlocksSealed(tuple(lease.sealed[p] for p in sorted(lease.sealed)))))
        if lease.first is not None:
            actions.append(ToPuller(pull, lease.first))
        return actions

    def _rival(self, lease: _Lease, placement: int) -> _Pull | None:
        """The open Pull that has to go if one of this placement opens: its own earlier one, or the lowest of all."""
        pulls = sorted(lease.pulls.values(), key=lambda pull: pull.key.placement)
        own = [pull for pull in pulls if pull.key.placement == placement]
        return own[0] if own else pulls[0] if len(pulls) >= lease.missing else None

    def _late(self, lease: _Lease, placement: int) -> bool:
        """As many higher placements as there are consumers have been here."""
        return len(lease.placements) >= lease.ticket.consumers and placement < lease.placements[0]

    def _want(self, lease: _Lease, pull: _Pull, positions: Sequence[int], now: float) -> list[Action]:
        if len(positions) > len(lease.blocks):  # a message holds millions, and looking at each would stop the loop
            return self._fail(lease, pull, now, positions=str(len(positions)), num_blocks=str(len(lease.blocks)))
        for position in positions:
            if not 0 <= position < len(lease.blocks):
                return self._fail(lease, pull, now, position=str(position), num_blocks=str(len(lease.blocks)))
            if pull.transport == "local" or position in pull.wanted:
                self.ignored["position wanted twice"] += 1
                continue
            pull.wanted.add(position)
            if position in lease.sealed:
                pull.queue.append(position)
        return self._send(lease, pull)

    def _send(self, lease: _Lease, pull: _Pull) -> list[Action]:
        actions: list[Action] = []
        while pull.queue and len(pull.in_flight) < pull.window:
            position = pull.queue.popleft()
            pull.in_flight.add(position)
            actions.append(SendBlock(pull.id, lease.sealed[position]))
        return actions

    def _copied(self, lease: _Lease, pull: _Pull, blocks: Sequence[BlockHandle], now: float) -> list[Action]:
        if len(blocks) > len(lease.blocks):
            return self._fail(lease, pull, now, positions=str(len(blocks)), num_blocks=str(len(lease.blocks)))
        return [ToPuller(pull.id, self._validate(lease, blocks))]

    def _validate(self, lease: _Lease, blocks: Sequence[BlockHandle]) -> BlocksValid:
        valid = {handle.position: lease.sealed.get(handle.position) == handle for handle in blocks}
        return BlocksValid(tuple(p for p in valid if valid[p]), tuple(p for p in valid if not valid[p]))

    def _done(self, lease: _Lease, pull: _Pull, now: float) -> list[Action]:
        if not lease.complete:
            return self._fail(lease, pull, now, field="done")
        if pull.transport == "local" and lease.first is not None and lease.first.finish_reason is None:
            return self.adopt(lease.ticket.id, pull.key)
        lease.delivered += 1
        actions = self._close(lease, pull)
        lease.unpulled_since = now
        if lease.missing == 0:
            del self._leases[lease.ticket.id]
            actions.append(FreeTicket(lease.ticket.id, None))
        return actions

    def _end(self, lease: _Lease, reason: Reason) -> list[Action]:
        """Frees a ticket that was not delivered."""
        del self._leases[lease.ticket.id]
        closing = [action for pull in list(lease.pulls.values()) for action in self._close(lease, pull, reason)]
        return [*closing, FreeTicket(lease.ticket.id, reason)]

    def _fail(self, lease: _Lease, pull: _Pull, now: float, **facts: str) -> list[Action]:
        """The peer said nonsense: its Pull ends, its ticket waits for a better one."""
        self._close(lease, pull)
        lease.unpulled_since = now
        return self._refuse(pull.id, pull.key, Reason.INVALID_FIELD, **facts)

    def _refuse(self, pull: int, key: RequestKey, reason: Reason, **facts: str) -> list[Action]:
        self.refused[reason] += 1
        self._closing.add(pull)
        return [ToPuller(pull, Failed(key, reason, reason not in _FINAL, facts)), ClosePull(pull)]

    def _close(self, lease: _Lease, pull: _Pull, reason: Reason | None = None) -> list[Action]:
        """Ends one open Pull of the lease, and tells it why, if there is a reason."""
        del lease.pulls[pull.id]
        del self._pulls[pull.id]
        if reason is not None:
            return self._refuse(pull.id, pull.key, reason)
        self._closing.add(pull.id)
        return [ClosePull(pull.id)]
