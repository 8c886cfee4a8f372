"""Ten thousand transfers between an owner and a puller whose copies are slow, stale, corrupt, cancelled or cut off.

No thread, no socket: a seeded choice delivers one message, copies one block or breaks one thing at a time. A copy
reads its source when it is delivered, even if the block has a new tenant by then, so that only the check after the
copy stands between a stale read and a wrong answer.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from kvtransfer_cores import Owner, Puller

from engine.messages import BlockHandle, Heartbeat, PullDone, RequestKey, Ticket
from engine.types import FinishReason
from kvtransfer.actions import Action, ClosePull, CloseStream, CopyBlocks, OpenPull, SendBlock, ToOwner, ToPuller

NUM_BLOCKS = 96


class Wire:
    """The streams between both: one ordered queue each way, and what the drivers do at their ends."""

    def __init__(self, owner: Owner, puller: Puller, rng: random.Random) -> None:
        self.owner = owner
        self.puller = puller
        self.rng = rng
        self.now = 0.0
        self.to_owner: dict[int, deque[object]] = {}
        self.to_puller: dict[int, deque[object]] = {}
        self.expected: dict[int, list[bytes]] = {}  # ticket -> the bytes that were sealed

    def carry(self, actions: list[Action]) -> None:
        for action in actions:
            pull = action.pull
            match action:
                case OpenPull(message=message):
                    self.to_owner[pull] = deque([message])
                    self.to_puller[pull] = deque()
                case CopyBlocks(handles=handles) if pull in self.to_puller:
                    self.to_puller[pull].extend(handles)
                case ToOwner(message=message) if pull in self.to_owner:
                    self.to_owner[pull].append(message)
                case ToPuller() | SendBlock() if pull in self.to_puller:
                    self.to_puller[pull].append(action)
                case ClosePull() if pull in self.to_puller:
                    self.to_puller[pull].append("end")
                case CloseStream() if pull in self.to_owner:
                    self.to_owner[pull].append("end")

    def deliver(self, pull: int) -> None:
        outward = self.to_owner[pull]
        inward = self.to_puller[pull]
        if outward and (not inward or self.rng.random() < 0.5):
            message = outward.popleft()
            if message == "end":
                self.cut(pull)
            else:
                self.carry(self.owner.pull_message(pull, message, self.now))
        elif inward:
            item = inward.popleft()
            if item == "end":
                self.cut(pull)
            elif isinstance(item, SendBlock):
                self.copy(pull, item.handle)
                self.carry(self.owner.sent(pull, item.handle.position, self.now))
            elif isinstance(item, BlockHandle):
                self.copy(pull, item)
            else:
                self.carry(self.puller.pull_event(pull, item.event, self.now))

    def copy(self, pull: int, handle: BlockHandle) -> None:
        position = handle.position
        block = self.puller.destination(pull, position)
        if block is not None:
            data = bytearray(self.owner.cache.block_bytes(handle.id))
            if self.rng.random() < 0.01:
                data[self.rng.randrange(len(data))] ^= 1
            self.puller.cache.block_bytes(block)[:] = data
            tokens = self.puller.block_tokens(pull, position)
            digest = self.puller.cache.digest(block, position, tokens)
            self.carry(self.puller.copied(pull, {position: digest}, self.now))

    def cut(self, pull: int) -> None:
        del self.to_owner[pull], self.to_puller[pull]
        self.carry(self.owner.pull_closed(pull, self.now))
        self.carry(self.puller.pull_stream_closed(pull, self.now))


class Load:
    def __init__(self, seed: int, transport: str) -> None:
        self.transport = transport
        self.rng = random.Random(seed)
        self.owner = Owner(NUM_BLOCKS)
        self.puller = Puller(NUM_BLOCKS)
        self.wire = Wire(self.owner, self.puller, self.rng)
        self.tickets: dict[int, tuple[Ticket, int]] = {}  # with how many blocks are sealed
        self.placements: dict[int, int] = {}
        self.right = 0

    def accept(self, request: int) -> None:
        ticket = self.owner.accept(RequestKey(request, 1), self.rng.randint(1, 20), self.wire.now)
        self.tickets[ticket.id] = (ticket, 0)
        self.wire.expected[ticket.id] = []
        self.pull(ticket)

    def pull(self, ticket: Ticket) -> None:
        self.placements[ticket.id] = placement = self.placements.get(ticket.id, 0) + 1
        key = RequestKey(self.owner.keys[ticket.id][0].request, 1, placement)
        _, actions = self.puller.start(ticket, key, self.wire.now, self.transport)
        self.wire.carry(actions)

    def compute(self, ticket: Ticket, sealed: int) -> None:
        until = min(ticket.num_blocks, sealed + self.rng.randint(1, 3))
        actions = self.owner.seal(ticket.id, range(sealed, until), self.wire.now)
        blocks = self.owner.tables[ticket.id]
        self.wire.expected[ticket.id] += [bytes(self.owner.cache.block_bytes(b)) for b in blocks[sealed:until]]
        self.wire.carry(actions)
        self.tickets[ticket.id] = (ticket, until)
        if until == ticket.num_blocks:
            reason = FinishReason.STOP if self.rng.random() < 0.05 else None
            self.wire.carry(self.owner.finish(ticket.id, self.wire.now, reason))

    def step(self) -> None:
        rng, wire = self.rng, self.wire
        wire.now += 0.001
        for ticket_id in [known for known in self.tickets if known not in self.owner.tables]:
            del self.tickets[ticket_id]
        if self.tickets:
            ticket, sealed = self.tickets[rng.choice(list(self.tickets))]
            if sealed < ticket.num_blocks and rng.random() < 0.3:
                self.compute(ticket, sealed)
            elif rng.random() < 0.02:
                self.pull(ticket)  # another placement takes over
            elif rng.random() < 0.005:
                wire.carry(self.owner.revoke(ticket.id, wire.now))
        if wire.to_owner:
            pull = rng.choice(list(wire.to_owner))
            wire.deliver(pull)
            trouble = rng.random()
            if trouble < 0.002:
                wire.carry(self.puller.cancel(pull, wire.now))
            elif trouble < 0.004 and pull in wire.to_owner:
                wire.cut(pull)
            elif trouble < 0.006 and pull in wire.to_owner:
                wire.to_owner[pull].append(rng.choice([PullDone(), Heartbeat(1)]))
        self.finish_slots()

    def finish_slots(self) -> None:
        while self.puller.ready:
            pull, notice = self.puller.ready.popitem()
            if notice.first_token.finish_reason is None:
                _, ticket = self.puller.jobs[pull]
                assert self.puller.data(pull) == self.wire.expected[ticket.id], "a slot runs on wrong bytes"
                self.puller.end(pull)
                self.right += 1

    def audit(self) -> None:
        self.owner.pool.audit(self.owner.holders())
        self.puller.pool.audit(self.puller.holders())

    def end(self) -> None:
        for ticket_id in list(self.owner.tables):
            self.wire.carry(self.owner.revoke(ticket_id, self.wire.now))
        for pull in list(self.wire.to_owner):
            self.wire.cut(pull)
        self.finish_slots()
        self.audit()
        assert self.owner.pool.available == self.puller.pool.available == NUM_BLOCKS
        assert len(self.owner.outbox) == len(self.puller.inbox) == 0


@pytest.mark.parametrize("transport", ["grpc", "memfd"])
def test_ten_thousand_transfers_leave_no_reference_behind_and_run_on_right_bytes(transport: str) -> None:
    load = Load(7, transport)
    request = steps = 0
    while request < 10_000:
        if len(load.tickets) < 8 and load.owner.pool.available >= 5 and load.puller.pool.available >= 40:
            load.accept(request)
            request += 1
        load.step()
        steps += 1
        if steps % 1000 == 0:
            load.audit()
    load.end()
    assert load.right > 5000, "most transfers succeed"
    assert len(load.puller.failed) > 500, "and many are made to fail"
