"""The owner's states: which Pull gets a ticket, what flows on it, and that a ticket is freed exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    PullWant,
    Reason,
    RequestKey,
    Ticket,
)
from engine.types import FinishReason, Token
from kvtransfer.actions import Action, ClosePull, FreeTicket, HandOver, SendBlock, ToPuller
from kvtransfer.outbox import Outbox

NODE = Node("prefill-0", 77, "host:1")
LAYOUT = b"layout"
KEY = RequestKey(5, 1)
WINDOW = 3  # blocks


def outbox(num_blocks: int = 4, ticket: int = 9, consumers: int = 1) -> Outbox:
    box = Outbox(NODE, LAYOUT, block_bytes=100)
    blocks = list(range(10, 10 + num_blocks))
    offered = Ticket(ticket, NODE, num_blocks * 4, num_blocks, 60.0, consumers=consumers)
    box.offer(offered, KEY, 1, 1000.0, blocks, [0] * num_blocks, 0.0)
    return box


def handle(position: int) -> BlockHandle:
    return BlockHandle(10 + position, 0, position, 1000 + position)


def opening(placement: int = 1, ticket: int = 9, **changes: object) -> PullOpen:
    fields = {"owner_incarnation": 77, "transport": "grpc", "layout_digest": LAYOUT, "window_bytes": WINDOW * 100}
    return PullOpen(**{"ticket": ticket, "key": RequestKey(5, 1, placement), **fields, **changes})


def first_token(finish_reason: FinishReason | None = None) -> FirstToken:
    return FirstToken(KEY, Token(0, 42), finish_reason)


def refusal(actions: list[Action], pull: int) -> Reason:
    """The reason of the only refusal in `actions`, which must close the pull after it."""
    (failed,) = [a.event for a in actions if isinstance(a, ToPuller) and isinstance(a.event, Failed) and a.pull == pull]
    assert actions[-1] == ClosePull(pull)
    return failed.reason


def sent_positions(actions: list[Action]) -> list[int]:
    return [action.handle.position for action in actions if isinstance(action, SendBlock)]


def test_everything_sealed_and_token_0_are_replayed_to_every_puller() -> None:
    box = outbox(2)
    box.sealed(9, [handle(0)], 0.0)
    assert box.pull_message(1, opening(), 0.0) == [
        ToPuller(1, PullOpened(LAYOUT)),
        ToPuller(1, BlocksSealed((handle(0),))),
    ]
    assert box.sealed(9, [handle(1)], 0.0) == [ToPuller(1, BlocksSealed((handle(1),)))]
    assert box.first_token(9, first_token(), 0.0) == [ToPuller(1, first_token())]
    box.pull_closed(1, 0.0)
    assert box.pull_message(2, opening(), 0.0) == [
        ToPuller(2, PullOpened(LAYOUT)),
        ToPuller(2, BlocksSealed((handle(0), handle(1)))),
        ToPuller(2, first_token()),
    ]


def test_bytes_flow_only_for_positions_that_were_asked_for_and_only_within_the_window() -> None:
    box = outbox(6)
    box.pull_message(1, opening(), 0.0)
    assert sent_positions(box.sealed(9, [handle(p) for p in range(5)], 0.0)) == []
    assert sent_positions(box.pull_message(1, PullWant((4, 0, 1, 2, 5)), 0.0)) == [4, 0, 1]
    assert sent_positions(box.sent(1, 0)) == [2]
    assert sent_positions(box.sent(1, 0)) == [], "one block makes room once"
    assert sent_positions(box.sent(1, 4)) == [], "5 is asked for and not sealed, 3 is sealed and not asked for"
    assert sent_positions(box.sealed(9, [handle(5)], 0.0)) == [5]
    assert sent_positions(box.pull_message(1, PullWant((4,)), 0.0)) == [], "what was sent is not sent again"
    assert box.ignored["position wanted twice"] == 1


def test_one_block_flows_even_if_it_is_larger_than_the_window() -> None:
    box = outbox(2)
    box.sealed(9, [handle(0), handle(1)], 0.0)
    box.pull_message(1, opening(window_bytes=1), 0.0)
    assert sent_positions(box.pull_message(1, PullWant((0, 1)), 0.0)) == [0]


def test_the_highest_placement_owns_the_ticket() -> None:
    box = outbox()
    box.pull_message(1, opening(2), 0.0)
    assert refusal(box.pull_message(2, opening(1), 0.0), 2) is Reason.SUPERSEDED
    actions = box.pull_message(3, opening(3), 0.0)
    assert refusal(actions[:2], 1) is Reason.SUPERSEDED
    assert actions[2] == ToPuller(3, PullOpened(LAYOUT))
    box.pull_closed(3, 0.0)
    assert refusal(box.pull_message(4, opening(2), 0.0), 4) is Reason.SUPERSEDED, "even while nobody pulls"


def test_of_two_pulls_with_one_placement_the_newer_wins() -> None:
    box = outbox()
    box.pull_message(1, opening(1), 0.0)
    actions = box.pull_message(2, opening(1), 0.0)
    assert refusal(actions[:2], 1) is Reason.SUPERSEDED
    box.pull_closed(1, 0.0)
    assert box.sealed(9, [handle(0)], 0.0) == [ToPuller(2, BlocksSealed((handle(0),)))]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (opening(ticket=10), Reason.STALE_TICKET),
        (opening(owner_incarnation=78), Reason.STALE_TICKET),
        (opening(key=RequestKey(6, 1, 1)), Reason.STALE_TICKET),
        (opening(key=RequestKey(5, 2, 1)), Reason.STALE_TICKET),
        (opening(layout_digest=b"other"), Reason.LAYOUT_MISMATCH),
        (opening(transport="pigeon"), Reason.UNIMPLEMENTED),
        (PullWant((0,)), Reason.INVALID_FIELD),
        (PullDone(), Reason.INVALID_FIELD),
    ],
)
def test_a_pull_that_does_not_fit_is_refused_and_the_right_one_goes_on(message: object, reason: Reason) -> None:
    box = outbox()
    box.pull_message(1, opening(), 0.0)
    assert refusal(box.pull_message(2, message, 0.0), 2) is reason
    assert box.refused[reason] == 1
    assert box.pull_message(2, PullWant((0,)), 0.0) == [], "nothing more is said to a pull that is over"
    assert box.sealed(9, [handle(0)], 0.0) == [ToPuller(1, BlocksSealed((handle(0),)))]


@pytest.mark.parametrize("position", [-1, 4, 2**31])
def test_a_position_out_of_range_ends_that_pull_and_not_the_ticket(position: int) -> None:
    box = outbox()
    box.pull_message(1, opening(), 0.0)
    assert refusal(box.pull_message(1, PullWant((0, position)), 0.0), 1) is Reason.INVALID_FIELD
    assert box.pull_message(2, opening(), 0.0)[0] == ToPuller(2, PullOpened(LAYOUT))


def test_done_frees_the_ticket_once() -> None:
    box = outbox(1)
    box.sealed(9, [handle(0)], 0.0)
    box.first_token(9, first_token(), 0.0)
    box.pull_message(1, opening(), 0.0)
    assert box.pull_message(1, PullDone(), 0.0) == [ClosePull(1), FreeTicket(9, None)]
    assert box.pull_message(1, PullDone(), 0.0) == [] == box.revoke(9, 0.0) == box.pull_closed(1, 0.0)
    assert refusal(box.pull_message(2, opening(), 0.0), 2) is Reason.STALE_TICKET


def test_done_before_the_end_of_the_prefill_is_nonsense() -> None:
    box = outbox(1)
    box.pull_message(1, opening(), 0.0)
    assert refusal(box.pull_message(1, PullDone(), 0.0), 1) is Reason.INVALID_FIELD
    assert 9 in box


def test_a_token_0_that_ends_the_request_needs_no_sealed_blocks() -> None:
    box = outbox()
    box.pull_message(1, opening(), 0.0)
    box.first_token(9, first_token(FinishReason.STOP), 0.0)
    assert box.pull_message(1, PullDone(), 0.0) == [ClosePull(1), FreeTicket(9, None)]


def test_two_consumers_end_the_ticket_with_the_second_done() -> None:
    box = outbox(1, consumers=2)
    box.sealed(9, [handle(0)], 0.0)
    box.first_token(9, first_token(), 0.0)
    box.pull_message(1, opening(), 0.0)
    assert box.pull_message(1, PullDone(), 0.0) == [ClosePull(1)]
    box.pull_message(2, opening(), 0.0)
    assert box.pull_message(2, PullDone(), 0.0) == [ClosePull(2), FreeTicket(9, None)]


def test_two_consumers_are_served_at_the_same_time_and_a_third_takes_the_place_of_the_lowest() -> None:
    box = outbox(2, consumers=2)
    box.pull_message(1, opening(1), 0.0)
    box.pull_message(2, opening(2), 0.0)
    sealed = box.sealed(9, [handle(0)], 0.0)
    assert [action.pull for action in sealed] == [1, 2]
    third = box.pull_message(3, opening(3), 0.0)
    assert third[:2] == [ToPuller(1, Failed(KEY._replace(placement=1), Reason.SUPERSEDED, True)), ClosePull(1)]
    late = box.pull_message(4, opening(1), 0.0)
    assert late[0].event.reason is Reason.SUPERSEDED and late[0].event.facts == {"placement": "3"}
    box.sealed(9, [handle(1)], 0.0)
    assert [action.pull for action in box.first_token(9, first_token(), 0.0)] == [2, 3]
    assert box.pull_message(3, PullDone(), 0.0) == [ClosePull(3)]
    assert box.pull_message(2, PullDone(), 0.0) == [ClosePull(2), FreeTicket(9, None)]


def test_a_ticket_without_a_pull_is_kept_for_a_minute() -> None:
    box = outbox()
    box.pull_message(1, opening(), 10.0)
    assert box.tick(500.0) == []
    box.pull_closed(1, 500.0)
    assert box.tick(559.9) == []
    assert box.tick(560.0) == [FreeTicket(9, Reason.STALE_TICKET)]
    assert box.tick(561.0) == []


def test_the_request_s_deadline_ends_its_ticket_and_its_pull() -> None:
    box = outbox()
    box.pull_message(1, opening(), 0.0)
    actions = box.tick(1000.0)
    assert refusal(actions[:2], 1) is Reason.DEADLINE
    assert actions[2:] == [FreeTicket(9, Reason.DEADLINE)]


def test_what_was_copied_can_be_compared_with_what_is_held() -> None:
    box = outbox(2)
    box.sealed(9, [handle(0)], 0.0)
    box.pull_message(1, opening(), 0.0)
    stale = handle(0)._replace(generation=1)
    copied = PullCopied((stale, handle(1)))
    assert box.pull_message(1, copied, 0.0) == [ToPuller(1, BlocksValid((), (0, 1)))]
    assert box.pull_message(1, PullCopied((handle(0),)), 0.0) == [ToPuller(1, BlocksValid((0,), ()))]


def test_more_copies_than_there_are_blocks_end_the_pull_unread() -> None:
    box = outbox(2)
    box.pull_message(1, opening(transport="memfd"), 0.0)
    refused, closed = box.pull_message(1, PullCopied((handle(0),) * 3), 0.0)
    assert refused.event.reason is Reason.INVALID_FIELD and closed == ClosePull(1)
    assert 9 in box


def test_a_transport_that_is_not_offered_is_refused() -> None:
    box = Outbox(NODE, LAYOUT, transports=("grpc",))
    box.offer(Ticket(9, NODE, 4, 1, 60.0), RequestKey(5, 1), 1, 100.0, [10], [0], 0.0)
    assert refusal(box.pull_message(1, opening(transport="memfd"), 0.0), 1) is Reason.UNIMPLEMENTED


def test_local_blocks_change_owner_instead_of_being_freed() -> None:
    box = outbox(2)
    box.sealed(9, [handle(0), handle(1)], 0.0)
    box.pull_message(-1, opening(transport="local"), 0.0)
    assert sent_positions(box.pull_message(-1, PullWant((0, 1)), 0.0)) == []
    assert box.adopt(9, RequestKey(5, 1, 1)) == [], "not before token 0"
    box.first_token(9, first_token(), 0.0)
    assert box.adopt(9, RequestKey(5, 1, 2)) == [], "not by another placement"
    assert box.pull_message(-1, PullDone(), 0.0) == [HandOver(-1, 9, (10, 11)), ClosePull(-1)]
    assert 9 not in box and box.leased_blocks == 0


def test_more_positions_than_there_are_blocks_end_the_pull_unread() -> None:
    box = outbox(2)
    box.pull_message(1, opening(), 0.0)
    refused, closed = box.pull_message(1, PullWant((0,) * 3), 0.0)
    assert refused.event.reason is Reason.INVALID_FIELD and closed == ClosePull(1)
    assert not box.ignored and 9 in box


def test_a_stream_may_not_claim_to_be_local_because_nobody_would_take_the_blocks() -> None:
    box = outbox(1)
    box.sealed(9, [handle(0)], 0.0)
    box.first_token(9, first_token(), 0.0)
    refused, closed = box.pull_message(1, opening(transport="local"), 0.0)
    assert refused.event.reason is Reason.UNIMPLEMENTED and closed == ClosePull(1)
    assert 9 in box, "the ticket is still good"


# What a PullOpen may have wrong, beside its placement.
FLAWS: list[dict[str, object]] = [
    {"owner_incarnation": 1},
    {"key": RequestKey(6, 1, 3)},
    {"key": RequestKey(5, 2, 3)},
    {"layout_digest": b"other"},
    {"transport": "pigeon"},
]


class OutboxMachine(RuleBasedStateMachine):
    """Offers, seals, pulls and endings of three tickets; `perform` checks each action as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Outbox(NODE, LAYOUT, ticket_ttl=60.0, block_bytes=100)
        self.now = 0.0
        self.size: dict[int, int] = {}  # ticket -> blocks, while it is held
        self.deadline: dict[int, float] = {}
        self.alone_since: dict[int, float] = {}
        self.sealed: dict[int, set[int]] = {}
        self.has_first: set[int] = set()
        self.ended: set[int] = set()
        self.open: dict[int, tuple[int, int]] = {}  # pull -> ticket, placement
        self.closing: set[int] = set()
        self.missing: dict[int, int] = {}  # consumers that have not taken it yet
        self.consumers: dict[int, int] = {}
        self.highest: dict[int, list[int]] = {}  # placements that have opened a Pull, as many as there are consumers
        self.announced: dict[int, set[int]] = {}
        self.token: set[int] = set()  # pulls that have token 0
        self.wanted: dict[int, set[int]] = {}
        self.started: dict[int, set[int]] = {}
        self.flying: dict[int, set[int]] = {}
        self.pulls = 0

    def perform(self, actions: list[Action], opening: int | None = None) -> None:
        for action in actions:
            match action:
                case ToPuller(pull, event):
                    assert pull in self.open or pull == opening, "an event for a pull that is over"
                    if isinstance(event, BlocksSealed):
                        new = {handle.position for handle in event.blocks}
                        assert new.isdisjoint(self.announced[pull])
                        self.announced[pull] |= new
                    if isinstance(event, FirstToken):
                        assert pull not in self.token
                        self.token.add(pull)
                case SendBlock(pull, handle):
                    assert handle.position in self.wanted[pull] & self.announced[pull] - self.started[pull]
                    self.started[pull].add(handle.position)
                    self.flying[pull].add(handle.position)
                    assert len(self.flying[pull]) <= WINDOW
                case ClosePull(pull):
                    assert pull not in self.closing
                    if pull in self.open:
                        self.alone_since[self.open.pop(pull)[0]] = self.now
                    self.closing.add(pull)
                case FreeTicket(ticket) | HandOver(_, ticket):
                    assert ticket not in self.ended, "freed twice"
                    self.ended.add(ticket)
                    del self.size[ticket]
                case _:
                    raise AssertionError(f"unexpected {action}")

    def ticket(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.size)))

    def open_pull(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.open)))

    @initialize()
    def begin(self) -> None:
        self.offer(6, 1000.0, 1)
        self.offer(4, 1000.0, 2)

    @precondition(lambda self: len(self.size) < 3)
    @rule(blocks=st.integers(1, 6), life=st.sampled_from([5.0, 1000.0]), consumers=st.sampled_from([1, 1, 2, 3]))
    def offer(self, blocks: int, life: float, consumers: int = 1) -> None:
        ticket = len(self.size) + len(self.ended)
        self.size[ticket] = blocks
        self.deadline[ticket] = self.now + life
        self.alone_since[ticket] = self.now
        self.sealed[ticket] = set()
        self.missing[ticket] = self.consumers[ticket] = consumers
        self.highest[ticket] = []
        offered = Ticket(ticket, NODE, blocks * 4, blocks, 60.0, (), consumers)
        generations = [0] * blocks
        self.box.offer(offered, KEY, 1, self.now + life, range(10, 10 + blocks), generations, self.now)

    @precondition(lambda self: self.size)
    @rule(data=st.data(), count=st.integers(1, 6))
    def seal(self, data: st.DataObject, count: int) -> None:
        """The next blocks, as a chunk ends; after the last one token 0."""
        ticket = self.ticket(data)
        done = len(self.sealed[ticket])
        new = range(done, min(done + count, self.size[ticket]))
        self.sealed[ticket].update(new)
        self.perform(self.box.sealed(ticket, [handle(p) for p in new], self.now))
        if len(self.sealed[ticket]) == self.size[ticket] and ticket not in self.has_first:
            self.has_first.add(ticket)
            self.perform(self.box.first_token(ticket, first_token(), self.now))

    @precondition(lambda self: self.size)
    @rule(data=st.data(), placement=st.integers(1, 5), flaw=st.sampled_from([{}] * 6 + FLAWS), lost=st.integers(0, 9))
    def pull(self, data: st.DataObject, placement: int, flaw: dict[str, object], lost: int) -> None:
        ticket = self.ticket(data) if lost else 1000
        if ticket in {its for its, _ in self.open.values()} and data.draw(st.integers(0, 2)):
            return  # takeovers are the rarer case
        self.pulls += 1
        pull = self.pulls
        before = {known: its for known, (each, its) in self.open.items() if each == ticket}
        gives_way = self.gives_way(ticket, placement, before) if lost else None
        wins = not flaw and lost and not self.late(ticket, placement)
        wins = wins and (gives_way is None or before[gives_way] <= placement)
        for state in (self.announced, self.wanted, self.started, self.flying):
            state[pull] = set()
        self.perform(self.box.pull_message(pull, opening(placement, ticket, **flaw), self.now), opening=pull)
        if wins:
            assert before.keys() & self.closing == ({gives_way} - {None}) and pull not in self.closing
            self.open[pull] = (ticket, placement)
            seen = sorted({*self.highest[ticket], placement})
            self.highest[ticket] = seen[-self.consumers[ticket] :]
            assert self.announced[pull] == self.sealed[ticket]
            assert (pull in self.token) == (ticket in self.has_first)
        else:
            assert pull in self.closing and self.closing.isdisjoint(before)

    def gives_way(self, ticket: int, placement: int, others: dict[int, int]) -> int | None:
        """Of these Pulls of the ticket, the one that ends if another begins with this placement."""
        if own := [pull for pull, its in others.items() if its == placement]:
            return own[0]
        return min(others, key=lambda pull: others[pull]) if len(others) >= self.missing[ticket] else None

    def late(self, ticket: int, placement: int) -> bool:
        return len(self.highest[ticket]) == self.consumers[ticket] and placement < self.highest[ticket][0]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), positions=st.sets(st.integers(0, 5), min_size=3), odd=st.integers(0, 19))
    def want(self, data: st.DataObject, positions: set[int], odd: int) -> None:
        pull = self.open_pull(data)
        blocks = self.size[self.open[pull][0]]
        positions = {p for p in positions if p < blocks} | ({-1} if odd == 1 else {blocks} if odd == 2 else set())
        self.wanted[pull] |= positions
        self.perform(self.box.pull_message(pull, PullWant(tuple(positions)), self.now))
        assert (pull in self.closing) == (odd in (1, 2)), "out of range ends the pull, and nothing else does"

    @precondition(lambda self: self.open)
    @rule(data=st.data(), positions=st.sets(st.integers(0, 3)), generation=st.integers(0, 1))
    def copied(self, data: st.DataObject, positions: set[int], generation: int) -> None:
        pull = self.open_pull(data)
        ticket, _ = self.open[pull]
        asked = {p for p in positions if p < self.size[ticket]}
        valid = asked & self.sealed[ticket] if generation == 0 else set()
        message = PullCopied(tuple(handle(p)._replace(generation=generation) for p in sorted(asked)))
        answer = BlocksValid(tuple(sorted(valid)), tuple(sorted(asked - valid)))
        assert self.box.pull_message(pull, message, self.now) == [ToPuller(pull, answer)]

    @precondition(lambda self: any(self.flying.values()))
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        pull = data.draw(st.sampled_from([pull for pull, flying in self.flying.items() if flying]))
        position = data.draw(st.sampled_from(sorted(self.flying[pull])))
        self.flying[pull].discard(position)
        self.perform(self.box.sent(pull, position))
        assert self.box.sent(pull, position) == [], "one block makes room once"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        pull = self.open_pull(data)
        ticket, _ = self.open[pull]
        if ticket not in self.has_first and data.draw(st.integers(0, 4)):
            return  # seldom too early
        self.missing[ticket] -= ticket in self.has_first
        self.perform(self.box.pull_message(pull, PullDone(), self.now))
        assert pull in self.closing
        assert (ticket in self.ended) == (self.missing[ticket] == 0)

    @precondition(lambda self: self.open or self.closing)
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        pull = data.draw(st.sampled_from(sorted({*self.open, *self.closing})))
        if pull in self.open and data.draw(st.integers(0, 2)):
            return
        self.perform(self.box.pull_closed(pull, self.now))
        if pull in self.open:
            self.alone_since[self.open.pop(pull)[0]] = self.now
        self.closing.discard(pull)
        self.flying[pull].clear()

    @precondition(lambda self: self.closing)
    @rule(data=st.data(), message=st.sampled_from([PullDone(), PullWant((0,)), Heartbeat(1), opening()]))
    def late_message(self, data: st.DataObject, message: object) -> None:
        pull = data.draw(st.sampled_from(sorted(self.closing)))
        assert self.box.pull_message(pull, message, self.now) == []

    @precondition(lambda self: self.open)
    @rule(data=st.data(), message=st.sampled_from([Heartbeat(1), opening(3)]))
    def repeated_message(self, data: st.DataObject, message: object) -> None:
        assert self.box.pull_message(self.open_pull(data), message, self.now) == []

    @precondition(lambda self: self.size)
    @rule(data=st.data(), luck=st.integers(0, 4))
    def revoke(self, data: st.DataObject, luck: int) -> None:
        ticket = self.ticket(data)
        if not luck:
            self.perform(self.box.revoke(ticket, self.now))
            assert ticket in self.ended
            assert self.box.revoke(ticket, self.now) == [] == self.box.sealed(ticket, [handle(0)], self.now)

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0, 61.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        pulled = {ticket for ticket, _ in self.open.values()}
        due = {ticket for ticket in self.size if self.now >= self.deadline[ticket]}
        due |= {t for t in self.size if t not in pulled and self.now >= self.alone_since[t] + 60.0}
        before = set(self.size)
        self.perform(self.box.tick(self.now))
        assert before - set(self.size) == due

    @invariant()
    def agrees(self) -> None:
        assert len(self.box) == len(self.size)
        assert self.box.leased_blocks == sum(self.size.values())
        for ticket, pulls in Counter(ticket for ticket, _ in self.open.values()).items():
            assert pulls <= self.missing[ticket], "as many Pulls as consumers that have not had it"
        for pull, (ticket, _) in self.open.items():
            assert self.announced[pull] == self.sealed[ticket]
            assert (pull in self.token) == (ticket in self.has_first)
            owed = self.wanted[pull] & self.announced[pull] - self.started[pull]
            assert not owed or len(self.flying[pull]) == WINDOW, "the window has room and nothing flows"

    def teardown(self) -> None:
        for ticket in list(self.size):
            self.perform(self.box.revoke(ticket, self.now))
        assert len(self.box) == 0 and not self.open


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
