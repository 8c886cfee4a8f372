"""One process, one pool: blocks move from ticket to slot in one step, and no reference is ever lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from kvtransfer_cores import Owner, Puller
from many_transfers import in_one_process

from engine.blocks import BlockPool
from engine.messages import PullOpen, Reason, RequestKey
from engine.types import FinishReason
from kvtransfer.actions import Action, HandOver, OpenPull
from kvtransfer.transports.local import LocalPair

KEY = RequestKey(5, 1)
PLACED = RequestKey(5, 1, 1)


class Process:
    def __init__(self) -> None:
        self.pool = BlockPool(32)
        self.owner = Owner(pool=self.pool)
        self.puller = Puller(pool=self.pool)
        self.pair = LocalPair(self.owner, self.puller)

    def carry(self, actions: list[Action]) -> list[Action]:
        rest = self.pair.carry(actions, 0.0)
        self.audit()
        return rest

    def audit(self) -> None:
        self.pool.audit(self.owner.holders() + self.puller.holders())

    def start(self, ticket: object, key: RequestKey = PLACED) -> int:
        pull, actions = self.puller.start(ticket, key, 0.0, "local")
        assert self.carry(actions) == []
        return pull


def test_the_decoder_gets_the_very_blocks_of_the_prefill() -> None:
    process = Process()
    ticket = process.owner.accept(KEY, 10, 0.0)
    blocks = process.owner.tables[ticket.id]
    pull = process.start(ticket)
    process.carry(process.owner.seal(ticket.id, [0, 1], 0.0))
    process.carry(process.owner.seal(ticket.id, [2], 0.0))
    assert pull not in process.puller.ready
    process.carry(process.owner.finish(ticket.id, 0.0))
    assert list(process.puller.ready[pull].blocks) == blocks == list(process.puller.bound[pull].values())
    assert process.puller.ready[pull].first_token.token.token_id == 42
    assert isinstance(process.owner.freed[0], HandOver) and not process.owner.tables
    process.puller.end(pull)
    assert process.pool.available == 32
    assert len(process.puller.inbox) == len(process.owner.outbox) == 0


def test_a_pull_that_opens_after_the_prefill_is_ready_at_once() -> None:
    process = Process()
    ticket = process.owner.accept(KEY, 10, 0.0)
    process.owner.seal(ticket.id, [0, 1, 2], 0.0)
    process.owner.finish(ticket.id, 0.0)
    assert process.start(ticket) in process.puller.ready


def test_a_token_0_that_ends_the_request_leaves_the_blocks_with_their_owner() -> None:
    process = Process()
    ticket = process.owner.accept(KEY, 10, 0.0)
    pull = process.start(ticket)
    process.carry(process.owner.finish(ticket.id, 0.0, FinishReason.STOP))
    assert process.puller.ready[pull].first_token.finish_reason is FinishReason.STOP
    assert process.pool.available == 32 and len(process.puller.inbox) == 0


def test_a_cancelled_decoder_leaves_the_ticket_for_another_placement() -> None:
    process = Process()
    ticket = process.owner.accept(KEY, 10, 0.0)
    first = process.start(ticket)
    process.carry(process.puller.cancel(first, 0.0))
    process.carry(process.owner.seal(ticket.id, [0, 1, 2], 0.0))
    process.carry(process.owner.finish(ticket.id, 0.0))
    assert first not in process.puller.ready
    assert process.start(ticket, RequestKey(5, 1, 2)) in process.puller.ready


def test_a_revoked_ticket_fails_its_local_pull() -> None:
    process = Process()
    ticket = process.owner.accept(KEY, 10, 0.0)
    pull = process.start(ticket)
    process.carry(process.owner.revoke(ticket.id, 0.0))
    assert process.puller.failed[pull] is Reason.STALE_TICKET
    assert process.pool.available == 32 and len(process.puller.inbox) == 0


Opening = Callable[[PullOpen], PullOpen]
BAD: dict[str, tuple[Opening, Reason]] = {
    "another layout": (lambda opening: replace(opening, layout_digest=b"another"), Reason.LAYOUT_MISMATCH),
    "an earlier incarnation": (lambda opening: replace(opening, owner_incarnation=76), Reason.STALE_TICKET),
    "an unknown ticket": (lambda opening: replace(opening, ticket=opening.ticket ^ 1), Reason.STALE_TICKET),
    "another request's": (lambda opening: replace(opening, key=RequestKey(6, 1, 1)), Reason.STALE_TICKET),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_opening_is_refused_by_name_and_no_ticket_is_hurt(name: str) -> None:
    process = Process()
    spoil, reason = BAD[name]
    ticket, other = process.owner.accept(KEY, 10, 0.0), process.owner.accept(RequestKey(9, 1), 10, 0.0)
    good = process.start(other, RequestKey(9, 1, 1))
    pull, (opening,) = process.puller.start(ticket, PLACED, 0.0, "local")
    assert isinstance(opening, OpenPull)
    process.carry([replace(opening, message=spoil(opening.message))])
    assert process.puller.failed == {pull: reason} and process.owner.outbox.refused == {reason: 1}
    again = process.start(ticket, RequestKey(5, 1, 2))
    for each in (ticket, other):
        process.carry(process.owner.seal(each.id, range(3), 0.0))
        process.carry(process.owner.finish(each.id, 0.0))
    assert {good, again} == process.puller.ready.keys()


def test_a_ticket_that_is_used_or_has_expired_is_refused_by_name() -> None:
    process = Process()
    used, expired = process.owner.accept(KEY, 10, 0.0), process.owner.accept(RequestKey(6, 1), 8, 0.0, deadline_at=1.0)
    process.start(used)
    process.carry(process.owner.seal(used.id, range(3), 0.0))
    process.carry(process.owner.finish(used.id, 0.0))
    process.carry(process.owner.tick(2.0))
    late = [process.start(used, RequestKey(5, 1, 2)), process.start(expired, RequestKey(6, 1, 1))]
    assert process.puller.failed == dict.fromkeys(late, Reason.STALE_TICKET)
    assert process.owner.outbox.refused == {Reason.STALE_TICKET: 2}


def test_pulls_from_other_hosts_pass_through() -> None:
    process = Process()
    far = Owner().accept(KEY, 10, 0.0)
    pull, actions = process.puller.start(far, PLACED, 0.0, "grpc")
    assert process.carry(actions) == actions and isinstance(actions[0], OpenPull)
    cancelled = process.puller.cancel(pull, 0.0)
    assert process.carry(cancelled) == cancelled


def test_random_local_transfers_leave_no_reference_behind() -> None:
    process = Process()
    rng = random.Random(1)
    owner, puller = process.owner, process.puller
    progress: dict[int, tuple[object, int, int | None]] = {}
    for request in range(2000):
        if process.pool.available >= 5:
            ticket = owner.accept(RequestKey(request, 1), rng.randint(1, 20), 0.0)
            progress[ticket.id] = (ticket, 0, None)
        for ticket_id, (ticket, sealed, pull) in list(progress.items()):
            if ticket_id not in owner.tables:
                del progress[ticket_id]
                continue
            if pull is None or pull in puller.failed or pull in puller.drained:
                key = RequestKey(owner.keys[ticket_id][0].request, 1, 1)
                pull, actions = puller.start(ticket, key, 0.0, "local")
                process.carry(actions)
            elif rng.random() < 0.1:
                process.carry(puller.cancel(pull, 0.0) if rng.random() < 0.5 else owner.revoke(ticket_id, 0.0))
            if ticket_id in owner.tables and sealed < ticket.num_blocks:
                process.carry(owner.seal(ticket_id, [sealed], 0.0))
                sealed += 1
                if sealed == ticket.num_blocks:
                    process.carry(owner.finish(ticket_id, 0.0))
            progress[ticket_id] = (ticket, sealed, pull)
        for done in [pull for pull in puller.ready if pull in puller.bound and rng.random() < 0.5]:
            puller.end(done)
    for ticket_id in list(owner.tables):
        process.carry(owner.revoke(ticket_id, 0.0))
    for done in list(puller.bound):
        puller.end(done)
    process.audit()
    assert len(puller.ready) > 300 and len(puller.failed) > 30
    assert process.pool.available == 32 and len(puller.inbox) == 0


def test_hundreds_of_transfers_with_cancellations_leave_nothing_behind() -> None:
    """`make soak` does ten thousand."""
    left = in_one_process(400)
    assert left.right + left.cancelled == 400 and left.cancelled > 20
    assert left.nothing, left
