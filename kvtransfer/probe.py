"""The small real transfer that proves a path before a request depends on it, and measures it.

Each worker's cache has a few blocks behind those of its pool. At the owner they hold random bytes, announced under
ticket 0 to whoever pulls it; at the puller they are where those bytes go. So a probe goes through the same states,
streams, copies, digests and questions as any pull, and neither pool notices. Sans-IO, as the cores it stands in for.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.messages import (
    BlockHandle,
    FirstToken,
    KvLayout,
    Node,
    PullEvent,
    PullOpen,
    PullRequest,
    Reason,
    RequestKey,
    Ticket,
)
from engine.types import Token
from kvtransfer.actions import Action, Announced, Drained, FreeTicket, Landed, PullFailed, Ready
from kvtransfer.inbox import Inbox
from kvtransfer.outbox import Outbox
from kvtransfer.paths import Cache
from kvtransfer.ticket import layout_digest

PROBE_TICKET = 0
PROBE_BYTES = 16 << 20
PROBE_BYTES_ON_CARD = 128 << 20
MOST_BLOCKS = 256
MOST_PROBES = 64  # pulls of probe blocks at a time
PROBE_SECONDS = 2.0  # without progress, after which a path has failed its probe
_KEY = RequestKey(1, 1, 1)


def spare_blocks(block_bytes: int, probe_bytes: int = PROBE_BYTES) -> int:
    """How many blocks a cache has behind its pool's: at least one to be probed by others, and one for own probes."""
    return max(2, min(MOST_BLOCKS, probe_bytes // block_bytes))


def fill(cache: Cache, spare: Sequence[int], seed: int) -> list[BlockHandle]:
    """Random bytes into the owner's spare blocks; blocking. A reader of anything else will not have their digests."""
    rng = random.Random(seed)
    handles = []
    for position, block in enumerate(spare):
        cache.write(block, 0, rng.randbytes(cache.layout.block_bytes))
        handles.append(BlockHandle(block, 0, position, cache.digest(block, position, ())))
    return handles


class ProbeOwner:
    """Answers pulls of ticket 0, each with a ticket of its own, so that many pullers may probe at once."""

    def __init__(self, node: Node, layout: KvLayout, handles: Sequence[BlockHandle], transports: Iterable[str]) -> None:
        self.handles = tuple(handles)
        self._node = node
        digest = layout_digest(layout)
        self._outbox = Outbox(node, digest, block_bytes=layout.block_bytes, transports=tuple(transports))
        self._tickets: dict[int, int] = {}  # pull -> ticket
        self._last = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]:
        if isinstance(message, PullOpen) and pull not in self._tickets and len(self._tickets) < MOST_PROBES:
            message = self._offer(pull, message, now)
        return _stream_actions(self._outbox.pull_message(pull, message, now))

    def sent(self, pull: int, position: int, now: float) -> list[Action]:
        return _stream_actions(self._outbox.sent(pull, position))

    def pull_closed(self, pull: int, now: float) -> list[Action]:
        actions = self._outbox.pull_closed(pull, now)
        ticket = self._tickets.pop(pull, None)
        if ticket is not None and ticket in self._outbox:
            actions += self._outbox.revoke(ticket, now)
        return _stream_actions(actions)

    def _offer(self, pull: int, message: PullOpen, now: float) -> PullOpen:
        self._last += 1
        ticket = Ticket(self._last, self._node, len(self.handles), len(self.handles), PROBE_SECONDS)
        self._tickets[pull] = ticket.id
        blocks, generations = [each.id for each in self.handles], [each.generation for each in self.handles]
        self._outbox.offer(ticket, message.key, 0, now + 3600, blocks, generations, now)
        self._outbox.sealed(ticket.id, self.handles, now)
        self._outbox.first_token(ticket.id, FirstToken(message.key, Token(0, 0)), now)
        return replace(message, ticket=ticket.id)


class ProbePuller:
    """Pulls `count` of the owner's `offered` probe blocks into this process's own."""

    def __init__(self, layout: KvLayout, spare: Sequence[int]) -> None:
        self._inbox = Inbox(layout_digest(layout), progress_seconds=PROBE_SECONDS)
        self._spare = spare
        self.seconds: float | None = None  # from the first copy to the owner's word on the last, once it is there
        self.failed: Reason | None = None
        self.over = False
        self._began = 0.0

    def start(self, owner: Node, offered: int, count: int, transport: str, now: float) -> list[Action]:
        ticket = Ticket(PROBE_TICKET, owner, offered, offered, PROBE_SECONDS)
        return self._inbox.open(ticket, _KEY, range(count, offered), transport, now)[1]

    def destination(self, pull: int, position: int) -> int | None:
        return self._inbox.destination(pull, position)

    def block_tokens(self, pull: int, position: int) -> Sequence[int]:
        return ()

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]:
        return self._notice(self._inbox.message(pull, event, now), now)

    def copied(self, pull: int, digests: Mapping[int, int], now: float) -> list[Action]:
        return self._notice(self._inbox.copied(pull, digests, now), now)

    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]:
        return self._notice(self._inbox.copy_failed(pull, position, now), now)

    def pull_stream_closed(self, pull: int, now: float) -> list[Action]:
        self.over = True
        return self._notice(self._inbox.stream_closed(pull, now), now)

    def tick(self, now: float) -> list[Action]:
        return self._notice(self._inbox.tick(now), now)

    def reroute(self, pull: int, transport: str, path: str) -> None:
        raise AssertionError("a probe goes by the path that it proves")

    def no_path(self, pull: int, cause: str, now: float) -> list[Action]:
        raise AssertionError("a probe goes by the path that it proves")

    def _notice(self, actions: Iterable[Action], now: float) -> list[Action]:
        rest: list[Action] = []
        for action in actions:
            match action:
                case Announced(pull, positions):
                    self._began = now
                    rest += self._inbox.bind(pull, {position: self._spare[position] for position in positions}, now)
                case Ready():
                    self.seconds = max(1e-9, now - self._began)
                case PullFailed(_, reason):
                    self.failed = reason
                case Landed() | Drained():
                    pass
                case _:
                    rest.append(action)
        return rest


def _stream_actions(actions: Iterable[Action]) -> list[Action]:
    """Nothing is given back: the blocks stay for the next probe."""
    return [action for action in actions if not isinstance(action, FreeTicket)]
