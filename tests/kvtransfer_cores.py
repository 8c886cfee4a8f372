"""The least owner and the least puller that transfer tests need: a pool, a cache and the sans-IO core of each.

They play the parts of the prefill and the decode worker without schedulers: the owner fills blocks with random
bytes, the puller binds whatever is announced. Notices are kept for the tests to look at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from engine.blocks import BlockPool, num_blocks_for
from engine.fake_runner import FakeCache
from engine.messages import (
    BlockHandle,
    FirstToken,
    KvLayout,
    Node,
    PullEvent,
    PullRequest,
    Reason,
    RequestKey,
    Ticket,
)
from engine.shared_memory import SharedMemory
from engine.types import FinishReason, Token
from kvtransfer.actions import Action, Adopted, Announced, Drained, FreeTicket, HandOver, Landed, PullFailed, Ready
from kvtransfer.inbox import Inbox
from kvtransfer.outbox import Outbox
from kvtransfer.ticket import layout_digest, mint

BLOCK_SIZE = 4
SPARE = 4  # blocks behind the pool's, for probes
NODE = Node("prefill-0", 77, "127.0.0.1:1")


def layout(block_bytes: int = 32) -> KvLayout:
    return KvLayout(b"model", "fake", BLOCK_SIZE, 1, 1, 1, block_bytes, "test")


def tokens_of(key: RequestKey, num_tokens: int) -> list[int]:
    return [(key.request * 31 + index) % 1000 for index in range(num_tokens)]


def block_tokens(key: RequestKey, num_tokens: int, position: int) -> list[int]:
    return tokens_of(key, num_tokens)[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]


class Owner:
    def __init__(
        self,
        num_blocks: int = 32,
        block_bytes: int = 32,
        node: Node = NODE,
        pool: BlockPool | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self.pool = pool or BlockPool(num_blocks)
        self.cache = FakeCache(layout(block_bytes), self.pool.num_blocks + SPARE)
        if memory is not None:
            self.cache.data = memoryview(memory.map)
        self.node = node
        self.outbox = Outbox(node, layout_digest(layout(block_bytes)), block_bytes=block_bytes)
        self.rng = random.Random(0)
        self.tables: dict[int, list[int]] = {}  # ticket -> blocks, referenced
        self.keys: dict[int, tuple[RequestKey, int]] = {}
        self.freed: list[FreeTicket | HandOver] = []
        self.handles: list[BlockHandle] = []  # of the last seal()

    def accept(
        self, key: RequestKey, num_tokens: int, now: float, deadline_at: float = 1e9, consumers: int = 1
    ) -> Ticket:
        count = num_blocks_for(num_tokens, BLOCK_SIZE)
        blocks = self.pool.take(count)
        ticket = Ticket(mint(self.rng, self.outbox), self.node, num_tokens, count, 60.0, (), consumers)
        self.tables[ticket.id] = blocks
        self.keys[ticket.id] = (key, num_tokens)
        generations = [self.pool.generation(block) for block in blocks]
        self.outbox.offer(ticket, key, 1, deadline_at, blocks, generations, now)
        return ticket

    def seal(self, ticket: int, positions: Iterable[int], now: float) -> list[Action]:
        """Fills these blocks with fresh bytes, as a prefill chunk does, and announces them."""
        key, num_tokens = self.keys[ticket]
        handles = []
        for position in positions:
            block = self.tables[ticket][position]
            self.cache.block_bytes(block)[:] = self.rng.randbytes(self.cache.layout.block_bytes)
            digest = self.cache.digest(block, position, block_tokens(key, num_tokens, position))
            handles.append(BlockHandle(block, self.pool.generation(block), position, digest))
        self.handles = handles
        return self._settle(self.outbox.sealed(ticket, handles, now))

    def finish(self, ticket: int, now: float, finish_reason: FinishReason | None = None) -> list[Action]:
        first = FirstToken(self.keys[ticket][0], Token(0, 42), finish_reason)
        return self._settle(self.outbox.first_token(ticket, first, now))

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]:
        return self._settle(self.outbox.pull_message(pull, message, now))

    def sent(self, pull: int, position: int, now: float) -> list[Action]:
        return self._settle(self.outbox.sent(pull, position))

    def pull_closed(self, pull: int, now: float) -> list[Action]:
        return self._settle(self.outbox.pull_closed(pull, now))

    def revoke(self, ticket: int, now: float) -> list[Action]:
        return self._settle(self.outbox.revoke(ticket, now))

    def tick(self, now: float) -> list[Action]:
        return self._settle(self.outbox.tick(now))

    def _settle(self, actions: list[Action]) -> list[Action]:
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, FreeTicket | HandOver):
                blocks = self.tables.pop(action.ticket)  # KeyError: freed twice
                self.freed.append(action)
                if isinstance(action, FreeTicket):
                    self.pool.give(blocks)
            if not isinstance(action, FreeTicket):
                rest.append(action)
        return rest

    def holders(self) -> list[list[int]]:
        return list(self.tables.values())


class Puller:
    def __init__(self, num_blocks: int = 32, block_bytes: int = 32, pool: BlockPool | None = None) -> None:
        self.pool = pool or BlockPool(num_blocks)
        self.cache = FakeCache(layout(block_bytes), self.pool.num_blocks + SPARE)
        self.inbox = Inbox(layout_digest(layout(block_bytes)))
        self.jobs: dict[int, tuple[RequestKey, Ticket]] = {}
        self.bound: dict[int, dict[int, int]] = {}  # pull -> position -> block, referenced
        self.ready: dict[int, Ready | Adopted] = {}
        self.failed: dict[int, Reason] = {}
        self.drained: list[int] = []
        self.landed: dict[int, list[int]] = {}
        self.paths: dict[int, str] = {}
        self.causes: dict[int, str] = {}
        self.bind_at_once = True

    def start(self, ticket: Ticket, key: RequestKey, now: float, transport: str = "grpc") -> tuple[int, list[Action]]:
        pull, actions = self.inbox.open(ticket, key, set(), transport, now)
        self.jobs[pull] = (key, ticket)
        self.bound[pull] = {}
        return pull, actions

    def destination(self, pull: int, position: int) -> int | None:
        return self.inbox.destination(pull, position)

    def block_tokens(self, pull: int, position: int) -> Sequence[int]:
        key, ticket = self.jobs[pull]
        return block_tokens(key, ticket.num_tokens, position)

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]:
        return self._notice(self.inbox.message(pull, event, now), now)

    def copied(self, pull: int, digests: Mapping[int, int], now: float) -> list[Action]:
        return self._notice(self.inbox.copied(pull, digests, now), now)

    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]:
        return self._notice(self.inbox.copy_failed(pull, position, now), now)

    def pull_stream_closed(self, pull: int, now: float) -> list[Action]:
        return self._notice(self.inbox.stream_closed(pull, now), now)

    def reroute(self, pull: int, transport: str, path: str) -> None:
        self.paths[pull] = path
        self.inbox.reroute(pull, transport)

    def no_path(self, pull: int, cause: str, now: float) -> list[Action]:
        self.causes[pull] = cause
        return self._notice(self.inbox.no_path(pull, {"cause": cause}), now)

    def adopted(self, pull: int, blocks: Sequence[int], now: float) -> list[Action]:
        return self._notice(self.inbox.adopted(pull, blocks, now), now)

    def cancel(self, pull: int, now: float) -> list[Action]:
        return self._notice(self.inbox.cancel(pull, now), now)

    def tick(self, now: float) -> list[Action]:
        return self._notice(self.inbox.tick(now), now)

    def bind(self, pull: int, positions: Iterable[int], now: float) -> list[Action]:
        wanted = [position for position in positions if position not in self.bound[pull]]
        destinations = dict(zip(wanted, self.pool.take(len(wanted)), strict=True))
        self.bound[pull].update(destinations)
        return self.inbox.bind(pull, destinations, now)

    def end(self, pull: int) -> None:
        """The slot of a finished transfer gives its blocks back."""
        self.pool.give(self.bound.pop(pull).values())

    def data(self, pull: int) -> list[bytes]:
        """The transferred blocks, in order."""
        return [bytes(self.cache.block_bytes(block)) for _, block in sorted(self.bound[pull].items())]

    def holders(self) -> list[list[int]]:
        return [list(bound.values()) for bound in self.bound.values()]

    def _notice(self, actions: list[Action], now: float) -> list[Action]:
        rest: list[Action] = []
        for action in actions:
            match action:
                case Announced(pull, positions):
                    if self.bind_at_once:
                        rest += self.bind(pull, positions, now)
                case Ready(pull):
                    assert pull not in self.ready, "ready twice"
                    self.ready[pull] = action
                case Adopted(pull, blocks):
                    self.ready[pull] = action
                    self.bound[pull] = dict(enumerate(blocks))
                case PullFailed(pull, reason):
                    assert pull not in self.failed and pull not in self.ready, "a second verdict"
                    self.failed[pull] = reason
                case Drained(pull, blocks):
                    assert sorted(blocks) == sorted(self.bound.pop(pull).values()), "drained blocks are the bound ones"
                    self.pool.give(blocks)
                    self.drained.append(pull)
                case Landed(pull, positions):
                    self.landed.setdefault(pull, []).extend(positions)
                case _:
                    rest.append(action)
        return rest
