"""The puller's states: nothing counts before it was validated, and no block is reused while a copy may write."""

from __future__ import annotations

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
    PullEvent,
    PullOpen,
    PullOpened,
    PullWant,
    Reason,
    RequestKey,
    Ticket,
)
from engine.types import FinishReason, Token
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
from kvtransfer.inbox import Inbox

NODE = Node("prefill-0", 77, "host:1")
LAYOUT = b"layout"
KEY = RequestKey(5, 1, 1)
FIRST = FirstToken(RequestKey(5, 1), Token(0, 42))
OTHER_ATTEMPT = FirstToken(RequestKey(5, 2), Token(0, 42))
SUPERSEDED = Failed(KEY, Reason.SUPERSEDED, True)
ENDING = FirstToken(RequestKey(5, 1), Token(0, 42), FinishReason.LENGTH)


def ticket(num_blocks: int) -> Ticket:
    return Ticket(9, NODE, num_blocks * 4, num_blocks, 60.0)


def handle(position: int) -> BlockHandle:
    return BlockHandle(10 + position, 0, position, 1000 + position)


def sealed(*positions: int) -> BlocksSealed:
    return BlocksSealed([handle(position) for position in positions])


def opened(num_blocks: int = 2, held: frozenset[int] = frozenset(), transport: str = "grpc") -> tuple[Inbox, int]:
    inbox = Inbox(LAYOUT)
    pull, _ = inbox.open(ticket(num_blocks), KEY, held, transport, 0.0)
    return inbox, pull


def test_a_pull_opens_with_all_that_its_owner_has_to_check() -> None:
    inbox = Inbox(LAYOUT)
    pull, actions = inbox.open(ticket(2), KEY, set(), "grpc", 0.0)
    message = PullOpen(9, KEY, 77, "grpc", LAYOUT, inbox.window_bytes)
    assert actions == [OpenPull(pull, "host:1", message)]


def test_blocks_are_bound_as_they_are_announced_and_the_slot_is_ready_with_the_last_of_them() -> None:
    inbox, pull = opened(2)
    assert inbox.message(pull, PullOpened(LAYOUT), 0.0) == []
    assert inbox.message(pull, sealed(0), 0.0) == [Announced(pull, (0,))]
    assert inbox.bind(pull, {0: 30}, 0.0) == [ToOwner(pull, PullWant((0,)))]
    assert inbox.copied(pull, {0: 1000}, 0.0) == [Landed(pull, [0])]
    assert inbox.destination(pull, 0) is None, "a block that landed is not written again"
    assert inbox.copied(pull, {0: 1000}, 0.0) == []
    assert inbox.message(pull, sealed(1), 0.0) == [Announced(pull, (1,))]
    assert inbox.message(pull, FIRST, 0.0) == []
    inbox.bind(pull, {1: 31}, 0.0)
    done = [Landed(pull, [1]), ToOwner(pull, PullDone()), CloseStream(pull), Ready(pull, FIRST)]
    assert inbox.copied(pull, {1: 1001}, 0.0) == done
    assert inbox.stream_closed(pull, 0.0) == []
    assert len(inbox) == 0


def test_held_positions_are_neither_announced_nor_waited_for() -> None:
    inbox, pull = opened(3, held=frozenset({0, 1}))
    assert inbox.message(pull, sealed(0, 1, 2), 0.0) == [Announced(pull, (2,))]
    inbox.message(pull, FIRST, 0.0)
    inbox.bind(pull, {2: 30}, 0.0)
    assert inbox.copied(pull, {2: 1002}, 0.0)[-1] == Ready(pull, FIRST)


def test_a_prompt_that_is_held_entirely_is_ready_with_token_0() -> None:
    inbox, pull = opened(2, held=frozenset({0, 1}))
    assert inbox.message(pull, sealed(0, 1), 0.0) == []
    assert inbox.message(pull, FIRST, 0.0) == [ToOwner(pull, PullDone()), CloseStream(pull), Ready(pull, FIRST)]


def test_a_wrong_digest_fails_the_pull_and_its_blocks_wait_for_the_end_of_the_stream() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0, 1), 0.0)
    inbox.bind(pull, {0: 30, 1: 31}, 0.0)
    inbox.copied(pull, {0: 1000}, 0.0)
    assert inbox.copied(pull, {1: 1000}, 0.0) == [PullFailed(pull, Reason.COPY_FAILED), CloseStream(pull)]
    assert sorted(inbox.draining) == [30, 31]
    assert inbox.destination(pull, 1) is None
    assert inbox.copied(pull, {1: 1001}, 0.0) == [], "a late copy changes nothing"
    assert inbox.tick(1e6) == [], "no timeout gives the blocks back"
    assert inbox.stream_closed(pull, 1e6) == [Drained(pull, (30, 31))]
    assert inbox.draining == [] and len(inbox) == 0


def test_bytes_before_their_announcement_are_not_trusted() -> None:
    inbox, pull = opened(1)
    inbox.bind(pull, {0: 30}, 0.0)
    assert inbox.copied(pull, {0: 1000}, 0.0)[0] == PullFailed(pull, Reason.COPY_FAILED)


def test_a_pull_with_nothing_under_way_drains_at_once() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0), 0.0)
    inbox.bind(pull, {0: 30}, 0.0)
    inbox.copied(pull, {0: 1000}, 0.0)
    assert inbox.cancel(pull, 0.0) == [CloseStream(pull), Drained(pull, (30,))]
    assert inbox.cancel(pull, 0.0) == [] == inbox.stream_closed(pull, 0.0)


def test_a_broken_stream_fails_and_drains_in_one_step() -> None:
    inbox, pull = opened(2)
    inbox.bind(pull, {0: 30}, 0.0)
    assert inbox.stream_closed(pull, 0.0) == [PullFailed(pull, Reason.COPY_FAILED), Drained(pull, (30,))]
    assert inbox.stream_closed(pull, 0.0) == [] == inbox.message(pull, FIRST, 0.0)


def test_a_cancelled_copy_drains_with_its_stream() -> None:
    inbox, pull = opened(2)
    inbox.bind(pull, {0: 30}, 0.0)
    assert inbox.cancel(pull, 0.0) == [CloseStream(pull)]
    assert inbox.message(pull, FIRST, 0.0) == []
    assert inbox.stream_closed(pull, 0.0) == [Drained(pull, (30,))]


def test_a_token_0_that_ends_the_request_does_not_wait_for_blocks() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0), 0.0)
    inbox.bind(pull, {0: 30}, 0.0)
    assert inbox.message(pull, ENDING, 0.0) == [
        ToOwner(pull, PullDone()),
        Ready(pull, ENDING),
        CloseStream(pull),
    ]
    assert inbox.draining == [30]
    assert inbox.stream_closed(pull, 0.0) == [Drained(pull, (30,))]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (SUPERSEDED, Reason.SUPERSEDED),
        (PullOpened(b"other"), Reason.LAYOUT_MISMATCH),
        (sealed(2), Reason.STALE_TICKET),
        (sealed(-1), Reason.STALE_TICKET),
        (BlocksSealed([handle(0)._replace(generation=1)]), Reason.STALE_TICKET),
        (FirstToken(RequestKey(5, 2), Token(0, 42)), Reason.STALE_TICKET),
        (FirstToken(RequestKey(6, 1), Token(0, 42)), Reason.STALE_TICKET),
    ],
)
def test_an_owner_that_says_no_or_nonsense_fails_its_own_pull(event: object, reason: Reason) -> None:
    inbox, pull = opened(2)
    other, _ = inbox.open(ticket(2), KEY, set(), "grpc", 0.0)
    inbox.message(pull, sealed(0), 0.0)
    assert inbox.message(pull, event, 0.0) == [PullFailed(pull, reason), CloseStream(pull), Drained(pull, ())]
    assert inbox.failed[reason] == 1
    assert inbox.message(other, sealed(0), 0.0) == [Announced(other, (0,))]


def test_repeated_and_late_messages_change_nothing_and_are_counted() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0, 1), 0.0)
    assert inbox.message(pull, sealed(1), 0.0) == []
    inbox.message(pull, FIRST, 0.0)
    assert inbox.message(pull, FIRST, 0.0) == []
    assert inbox.message(pull, BlocksValid((0,)), 0.0) == []
    assert inbox.copied(pull, {0: 1000}, 0.0) == [], "nothing is bound there"
    assert inbox.message(99, FIRST, 0.0) == [] == inbox.copy_failed(99, 0, 0.0)
    assert set(inbox.ignored) == {
        "block announced twice", "second FirstToken", "BlocksValid", "copied", "message", "copy_failed",
    }  # fmt: skip


def test_a_wanted_block_that_does_not_come_fails_the_pull_even_while_its_owner_heartbeats() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0), 0.0)
    inbox.bind(pull, {0: 30}, 100.0)
    inbox.message(pull, Heartbeat(1), 109.0)
    assert inbox.tick(109.9) == []
    assert inbox.tick(110.0) == [PullFailed(pull, Reason.COPY_FAILED), CloseStream(pull)]


def test_a_slow_prefill_is_no_failure_while_its_owner_heartbeats() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0), 0.0)
    inbox.bind(pull, {0: 30}, 0.0)
    inbox.copied(pull, {0: 1000}, 1.0)
    for second in range(2, 60):
        inbox.message(pull, Heartbeat(second), second)
        assert inbox.tick(second) == []
    assert inbox.tick(69.0)[0] == PullFailed(pull, Reason.COPY_FAILED)


def test_a_slot_that_still_waits_for_room_has_no_progress_deadline() -> None:
    inbox, pull = opened(2)
    inbox.message(pull, sealed(0, 1), 0.0)
    assert inbox.tick(1000.0) == []
    inbox.bind(pull, {0: 30}, 1000.0)
    assert inbox.tick(1009.0) == []


def test_local_blocks_are_adopted_when_all_of_them_are_sealed_and_token_0_is_known() -> None:
    inbox, pull = opened(2, transport="local")
    assert inbox.message(pull, sealed(0), 0.0) == []
    assert inbox.message(pull, FIRST, 0.0) == []
    assert inbox.message(pull, sealed(1), 0.0) == [ToOwner(pull, PullDone())]
    assert inbox.adopted(pull, (10, 11), 0.0) == [Adopted(pull, (10, 11), FIRST)]
    assert inbox.stream_closed(pull, 0.0) == []


def test_an_adoption_that_nobody_waits_for_comes_straight_back() -> None:
    inbox, pull = opened(1, transport="local")
    assert inbox.adopted(pull, (10,), 0.0) == [Drained(pull, (10,))]


def test_copied_blocks_count_only_after_the_owner_s_word_and_it_is_asked_once_for_all_of_them() -> None:
    inbox, pull = opened(2, transport="memfd")
    inbox.message(pull, FIRST, 0.0)
    inbox.message(pull, sealed(0, 1), 0.0)
    assert inbox.bind(pull, {0: 30, 1: 31}, 0.0) == [CopyBlocks(pull, [handle(0), handle(1)])]
    assert inbox.copied(pull, {0: 1000}, 0.0) == []
    assert inbox.destination(pull, 0) is None, "what the owner is asked about is not written again"
    assert inbox.message(pull, BlocksValid((0,)), 0.0) == [], "nobody has asked yet"
    assert inbox.copied(pull, {1: 1001}, 0.0) == [ToOwner(pull, PullCopied((handle(0), handle(1))))]
    done = [Landed(pull, [0, 1]), ToOwner(pull, PullDone()), CloseStream(pull), Ready(pull, FIRST)]
    assert inbox.message(pull, BlocksValid((0, 1, 7)), 0.0) == done


def test_blocks_that_were_bound_before_they_were_announced_are_asked_about_once_however_often_they_are_copied() -> None:
    inbox, pull = opened(2, transport="memfd")
    assert inbox.bind(pull, {0: 30, 1: 31}, 0.0) == []
    inbox.message(pull, sealed(0, 1), 0.0)
    assert inbox.copied(pull, {0: 1000}, 0.0) == []
    asked = [ToOwner(pull, PullCopied((handle(0), handle(1))))]
    assert inbox.copied(pull, {0: 1000, 1: 1001}, 0.0) == asked and inbox.ignored["copied"] == 1


def test_a_copied_block_that_was_not_the_announced_one_any_more_fails_the_pull() -> None:
    inbox, pull = opened(2, transport="memfd")
    inbox.message(pull, sealed(0, 1), 0.0)
    inbox.bind(pull, {0: 30, 1: 31}, 0.0)
    inbox.copied(pull, {0: 1000}, 0.0)
    inbox.copied(pull, {1: 1001}, 0.0)
    assert inbox.message(pull, BlocksValid((0,), (1,)), 0.0) == [
        PullFailed(pull, Reason.COPY_FAILED),
        CloseStream(pull),
        Drained(pull, (30, 31)),
    ]


def test_a_copied_block_with_a_wrong_digest_is_not_asked_about() -> None:
    inbox, pull = opened(1, transport="memfd")
    inbox.message(pull, sealed(0), 0.0)
    inbox.bind(pull, {0: 30}, 0.0)
    assert inbox.copied(pull, {0: 999}, 0.0)[0] == PullFailed(pull, Reason.COPY_FAILED)


def test_an_owner_that_does_not_say_whether_a_copy_was_right_fails_the_pull() -> None:
    inbox, pull = opened(1, transport="memfd")
    inbox.message(pull, sealed(0), 0.0)
    inbox.bind(pull, {0: 30}, 0.0)
    inbox.copied(pull, {0: 1000}, 0.0)
    inbox.message(pull, Heartbeat(1), 9.0)
    assert inbox.tick(10.0)[0] == PullFailed(pull, Reason.COPY_FAILED)


def test_a_pull_that_falls_back_asks_for_bytes() -> None:
    inbox, pull = opened(1, transport="memfd")
    inbox.reroute(pull, "grpc")
    inbox.message(pull, sealed(0), 0.0)
    assert inbox.bind(pull, {0: 30}, 0.0) == [ToOwner(pull, PullWant((0,)))]
    inbox.cancel(pull, 0.0)
    inbox.reroute(pull, "grpc")
    assert inbox.ignored == {"reroute": 1}


class InboxMachine(RuleBasedStateMachine):
    """Several pulls under random messages, copies and endings. Destination blocks are never used twice here, so
    that every one of them must end in exactly one of: a running slot, Drained, or still with the inbox."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox(LAYOUT)
        self.now = 0.0
        self.size: dict[int, int] = {}
        self.held: dict[int, frozenset[int]] = {}
        self.announced: dict[int, set[int]] = {}
        self.bound: dict[int, dict[int, int]] = {}
        self.landed: dict[int, set[int]] = {}
        self.first: dict[int, FirstToken] = {}
        self.verdict: dict[int, str] = {}
        self.stream_over: set[int] = set()
        self.drained: set[int] = set()
        self.closed: set[int] = set()
        self.done: set[int] = set()
        self.arriving: set[int] = set()
        self.heard: dict[int, float] = {}
        self.moved: dict[int, float] = {}
        self.next_block = 0
        self.memory: dict[int, bool] = {}  # one-sided
        self.copied_ones: dict[int, set[int]] = {}  # in place, whether or not the owner has confirmed them
        self.asked: dict[int, set[int]] = {}

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            pull = action.pull
            match action:
                case Announced(_, positions):
                    assert pull not in self.verdict
                    assert set(positions) <= self.announced[pull] - self.held[pull]
                case Landed(_, positions):
                    assert pull not in self.verdict and self.landed[pull].isdisjoint(positions)
                    self.landed[pull].update(positions)
                case CopyBlocks(_, blocks):
                    positions = {block.position for block in blocks}
                    assert self.memory[pull] and list(blocks) == [handle(block.position) for block in blocks]
                    assert positions <= self.announced[pull] & self.bound[pull].keys() - self.landed[pull]
                case ToOwner(_, PullCopied(blocks)):
                    positions = {block.position for block in blocks}
                    assert self.memory[pull] and positions and positions <= self.copied_ones[pull] - self.asked[pull]
                    self.asked[pull] |= positions
                case ToOwner(_, PullWant()):
                    assert not self.memory[pull] and pull not in self.verdict
                case ToOwner(_, PullDone()):
                    assert pull not in self.done | self.closed
                    self.done.add(pull)
                case ToOwner():
                    assert pull not in self.verdict and pull not in self.done
                case CloseStream():
                    assert pull not in self.closed | self.stream_over
                    self.closed.add(pull)
                case Ready(_, first):
                    assert pull not in self.verdict and pull in self.done
                    assert first == self.first[pull]
                    complete = self.landed[pull] | self.held[pull] == set(range(self.size[pull]))
                    assert complete or first.finish_reason
                    self.verdict[pull] = "ended" if first.finish_reason else "ready"
                case PullFailed():
                    assert pull not in self.verdict
                    self.verdict[pull] = "failed"
                case Drained(_, blocks):
                    assert self.verdict[pull] in ("failed", "cancelled", "ended") and pull not in self.drained
                    assert sorted(blocks) == sorted(self.bound[pull].values())
                    copying = set(self.bound[pull]) - self.landed[pull] - self.copied_ones[pull]
                    assert not copying or pull in self.stream_over, "a copy can still write"
                    self.drained.add(pull)
                case _:
                    raise AssertionError(f"unexpected {action}")

    def live(self) -> list[int]:
        return [pull for pull in self.size if pull not in self.verdict]

    def a_pull(self, data: st.DataObject) -> int:
        """Mostly one that is live."""
        live = self.live()
        return data.draw(st.sampled_from(live * 6 + list(self.size) + [99]))

    @initialize()
    def begin(self) -> None:
        self.open(4, set())

    @precondition(lambda self: len(self.live()) < 3)
    @rule(blocks=st.integers(1, 4), held=st.sets(st.integers(0, 3), max_size=2), memory=st.booleans())
    def open(self, blocks: int, held: set[int], memory: bool = False) -> None:
        mine = frozenset(p for p in held if p < blocks)
        pull, actions = self.inbox.open(ticket(blocks), KEY, mine, "memfd" if memory else "grpc", self.now)
        assert pull not in self.size and isinstance(actions[0], OpenPull)
        self.size[pull], self.held[pull] = blocks, mine
        self.announced[pull], self.bound[pull], self.landed[pull] = set(), {}, set()
        self.memory[pull], self.copied_ones[pull], self.asked[pull] = memory, set(), set()
        self.heard[pull] = self.moved[pull] = self.now

    @rule(data=st.data(), positions=st.sets(st.integers(0, 3), min_size=1), odd=st.integers(0, 19))
    def seal(self, data: st.DataObject, positions: set[int], odd: int) -> None:
        """odd 1: a position out of range; odd 2: another generation than before."""
        pull = self.a_pull(data)
        blocks = [handle(p) for p in sorted(positions) if p < self.size.get(pull, 4)]
        if odd == 1:
            blocks.append(handle(self.size.get(pull, 4)))
        if odd == 2 and self.announced.get(pull):
            blocks = [handle(min(self.announced[pull]))._replace(generation=1)]
        live = pull in self.live()
        wrong = odd == 1 or (odd == 2 and bool(self.announced.get(pull)))
        if live and not wrong:
            self.announced[pull] |= {each.position for each in blocks}
        self.perform(self.message(pull, BlocksSealed(blocks)))
        if live:
            assert (self.verdict.get(pull) == "failed") == wrong

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        pull = data.draw(st.sampled_from(self.live()))
        free = [p for p in range(self.size[pull]) if p not in self.held[pull] and p not in self.bound[pull]]
        chosen = data.draw(st.sets(st.sampled_from(free), min_size=1)) if free else set()
        destinations = {position: self.next_block + number for number, position in enumerate(sorted(chosen))}
        self.next_block += len(chosen)
        self.bound[pull].update(destinations)
        self.arriving.add(pull)
        self.heard[pull] = self.moved[pull] = self.now
        self.perform(self.inbox.bind(pull, destinations, self.now))

    @rule(data=st.data(), position=st.integers(0, 3), odd=st.integers(0, 19))
    def copied(self, data: st.DataObject, position: int, odd: int) -> None:
        """odd 1: before its announcement; odd 2: other bytes."""
        pull = self.a_pull(data)
        early = position not in self.announced.get(pull, ())
        if early and odd != 1:
            return
        writable = self.inbox.destination(pull, position)
        waits = pull in self.live() and position in self.bound[pull] and position not in self.landed[pull]
        waits = waits and position not in self.copied_ones[pull]
        assert (writable is not None) == waits
        if waits and not early and odd != 2:
            self.heard[pull] = self.moved[pull] = self.now
            if self.memory[pull]:
                self.copied_ones[pull].add(position)
        actions = self.inbox.copied(pull, {position: 1000 + position + int(odd == 2)}, self.now)
        right = waits and not early and odd != 2
        assert bool(actions) == waits or (right and self.memory[pull])
        self.perform(actions)
        if waits:
            assert (self.verdict.get(pull) == "failed") == (early or odd == 2)

    @rule(data=st.data(), odd=st.integers(0, 9))
    def owner_s_word(self, data: st.DataObject, odd: int) -> None:
        """odd 1: one of them is stale; odd 2: about blocks that it was not asked about."""
        pull = self.a_pull(data)
        waiting = self.asked.get(pull, set()) - self.landed.get(pull, set())
        others = set(range(4)) - waiting
        stale = {min(waiting)} if odd == 1 and waiting else set()
        valid = others if odd == 2 else waiting - stale
        live = pull in self.live()
        before = set(self.landed.get(pull, ()))
        self.perform(self.message(pull, BlocksValid(tuple(sorted(valid)), tuple(stale))))
        if live:
            assert (self.verdict.get(pull) == "failed") == bool(stale)
            assert self.landed[pull] == before | (set() if odd == 2 or stale else waiting)

    @rule(data=st.data(), first=st.sampled_from([FIRST] * 8 + [ENDING, OTHER_ATTEMPT]))
    def token_0(self, data: st.DataObject, first: FirstToken) -> None:
        pull = self.a_pull(data)
        live = pull in self.live()
        if live and first is not OTHER_ATTEMPT:
            self.first.setdefault(pull, first)
        self.perform(self.message(pull, first))
        if live:
            assert (self.verdict.get(pull) == "failed") == (first is OTHER_ATTEMPT)

    @rule(data=st.data(), event=st.sampled_from([Heartbeat(1)] * 8 + [SUPERSEDED]))
    def other_event(self, data: st.DataObject, event: Failed | Heartbeat) -> None:
        self.perform(self.message(self.a_pull(data), event))

    @rule(data=st.data(), luck=st.integers(0, 5))
    def ending(self, data: st.DataObject, luck: int) -> None:
        pull = self.a_pull(data)
        if luck == 0:
            self.perform(self.inbox.copy_failed(pull, 0, self.now))
        elif luck == 1:
            if pull in self.live():
                self.verdict[pull] = "cancelled"
            self.perform(self.inbox.cancel(pull, self.now))
        elif luck == 2 or pull in self.closed:
            self.stream_over.add(pull)
            self.perform(self.inbox.stream_closed(pull, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        due = set()
        for pull in self.arriving & set(self.live()):
            owed = self.announced[pull] & self.bound[pull].keys() - self.landed[pull]
            if self.now >= (self.moved if owed else self.heard)[pull] + 10.0:
                due.add(pull)
        before = set(self.live())
        self.perform(self.inbox.tick(self.now))
        assert before - set(self.live()) == due

    def message(self, pull: int, event: PullEvent) -> list[Action]:
        if pull in self.live():
            self.heard[pull] = self.now
            if not isinstance(event, Heartbeat):
                self.moved[pull] = self.now
        return self.inbox.message(pull, event, self.now)

    @invariant()
    def every_block_is_somewhere(self) -> None:
        waiting = []
        for pull, bound in self.bound.items():
            if self.verdict.get(pull, "ready") != "ready" and pull not in self.drained:
                waiting += bound.values()
        assert sorted(self.inbox.draining) == sorted(waiting)
        complete = [p for p in self.live() if self.landed[p] | self.held[p] == set(range(self.size[p]))]
        assert not any(pull in self.first for pull in complete), "everything is there and the slot does not run"
        assert len(self.inbox) == len([pull for pull in self.size if pull not in self.stream_over])

    def teardown(self) -> None:
        for pull in self.size:
            if pull not in self.stream_over:
                self.stream_over.add(pull)
                self.perform(self.inbox.stream_closed(pull, self.now))
        assert len(self.inbox) == 0 and not self.inbox.draining and not self.live()
        assert self.drained == {pull for pull, verdict in self.verdict.items() if verdict != "ready"}


TestInboxMachine = InboxMachine.TestCase
TestInboxMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
