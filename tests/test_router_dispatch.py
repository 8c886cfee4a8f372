"""The dispatcher as its driver sees it: actions for events, with hand-written workers."""

from __future__ import annotations

import random

import pytest

from engine.messages import (
    Cancel,
    Credit,
    DecodeStart,
    Failed,
    Finish,
    FirstToken,
    KvLayout,
    Node,
    PrefillAccepted,
    PrefillStart,
    Reason,
    Refused,
    RequestKey,
    Row,
    StageTimes,
    StepBatch,
    Ticket,
    WorkerHello,
    WorkerLoad,
)
from engine.types import FinishReason, SamplingParams, Token
from router.actions import Action, Emit, End, RouterRequest, ToWorker
from router.admission import Overloaded, RouterConfig, TooLong
from router.dispatch import Dispatcher
from router.workers import Role

LAYOUT = KvLayout(b"m" * 32, "float32", 16, 2, 2, 64, 8192, "cpu")


def hello(address: str, incarnation: int = 1, layout: KvLayout = LAYOUT, blocks: int = 100) -> WorkerHello:
    return WorkerHello(Node(address, incarnation, address), layout, blocks, 8, 4096)


class World:
    """A dispatcher with workers p1, p2, d1, d2 that do only what a test says."""

    def __init__(self, prefill: tuple[str, ...] = ("p1", "p2"), decode: tuple[str, ...] = ("d1", "d2"), **config):
        self.now = 0.0
        self.core = Dispatcher(RouterConfig(**config), random.Random(1))
        self.sent: list[ToWorker] = []
        self.emitted: list[int] = []
        self.ends: list[End] = []
        for address in prefill:
            self.do(self.core.worker_up(address, Role.PREFILL, hello(address), 0.0))
        for address in decode:
            self.do(self.core.worker_up(address, Role.DECODE, hello(address), 0.0))

    def do(self, actions: list[Action]) -> None:
        self.core.audit()
        for action in actions:
            if isinstance(action, ToWorker):
                self.sent.append(action)
            elif isinstance(action, Emit):
                self.emitted += [token.token_id for token in action.tokens]
            else:
                self.ends.append(action)

    def submit(self, prompt: int = 20, max_tokens: int | None = 8, deadline: float = 600.0, **more) -> int:
        params = SamplingParams(max_tokens=max_tokens, seed=1)
        number, actions = self.core.submit(RouterRequest(range(prompt), params, deadline, **more), self.now)
        self.do(actions)
        return number

    def last(self, kind: type) -> ToWorker:
        return next(each for each in reversed(self.sent) if isinstance(each.command, kind))

    def cancels(self) -> list[tuple[str, RequestKey]]:
        return [(each.address, each.command.key) for each in self.sent if isinstance(each.command, Cancel)]

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.do(self.core.tick(self.now))

    def accept(self) -> None:
        start = self.last(PrefillStart)
        ticket = Ticket(7, Node(start.address, 1, start.address), len(start.command.token_ids), 2, 60.0)
        event = PrefillAccepted(start.command.key, ticket, 0)
        self.do(self.core.on_event(start.address, Role.PREFILL, event, self.now))

    def first(self, kind: type, token: int, finish: FinishReason | None = None) -> None:
        start = self.last(kind)
        event = FirstToken(start.command.key, Token(start.command.emitted, token), finish)
        role = Role.PREFILL if kind is PrefillStart else Role.DECODE
        self.do(self.core.on_event(start.address, role, event, self.now))

    def step(self, index: int, token: int, finish: FinishReason | None = None, at: ToWorker | None = None) -> None:
        start = at or self.last(DecodeStart)
        key = start.command.key
        finishes = [Finish(key, finish, None, StageTimes(0.1, 0.2, 0.3))] if finish else []
        batch = StepBatch(1, [Row(key, Token(index, token))], finishes)
        self.do(self.core.on_event(start.address, Role.DECODE, batch, self.now))

    def running(self, **more) -> int:
        """A request that has token 0 from both sides."""
        number = self.submit(**more)
        self.accept()
        self.first(PrefillStart, 100)
        self.first(DecodeStart, 100)
        return number

    def down(self, start: ToWorker) -> None:
        self.do(self.core.worker_down(start.address, start.role, self.now))


def test_a_request_gets_each_token_once_whichever_leg_says_it_first():
    world = World()
    world.submit(max_tokens=3)
    world.accept()
    world.first(DecodeStart, 100)
    world.first(PrefillStart, 100)
    world.step(1, 101)
    world.step(1, 101)
    world.step(2, 102, FinishReason.LENGTH)
    assert world.emitted == [100, 101, 102]
    (end,) = world.ends
    assert end.outcome.code == "OK" and end.outcome.completion_tokens == 3
    assert end.outcome.times.decode == 0.2 and end.outcome.times.transfer == 0.3
    assert not world.cancels() and world.core.idle
    assert world.core.ignored == {"FirstToken": 1, "Row": 1}


def test_decode_starts_while_the_prefill_runs_and_gets_only_what_the_ticket_covers():
    world = World()
    world.submit()
    world.accept()
    start = world.last(DecodeStart).command
    assert start.emitted == 0 and list(start.token_ids) == list(range(20))
    assert start.key.placement == 1 and start.until_index == 64


def test_one_remaining_token_needs_no_decode_worker_and_leaves_no_ticket():
    world = World()
    world.submit(max_tokens=1)
    world.accept()
    world.first(PrefillStart, 100, FinishReason.LENGTH)
    assert not [each for each in world.sent if each.role is Role.DECODE]
    assert [address for address, _ in world.cancels()] == [world.last(PrefillStart).address]
    assert world.ends[0].outcome.finish_reason is FinishReason.LENGTH


def test_a_prefill_worker_that_dies_before_the_echo_costs_an_attempt_and_no_token():
    world = World()
    world.submit()
    world.accept()
    world.first(PrefillStart, 100)
    old = world.last(PrefillStart)
    decode = world.last(DecodeStart)
    world.down(old)
    new = world.last(PrefillStart)
    assert new.address != old.address and new.command.key.attempt == 2
    assert new.command.emitted == 1 and list(new.command.token_ids) == [*range(20), 100]
    assert (decode.address, decode.command.key) in world.cancels()
    world.step(1, 999, at=decode)  # too late: another attempt is current
    assert world.emitted == [100]


def test_a_prefill_worker_that_dies_after_the_echo_costs_nothing():
    world = World()
    world.running()
    world.down(world.last(PrefillStart))
    world.step(1, 101)
    assert world.emitted == [100, 101] and world.last(PrefillStart).command.key.attempt == 1


def test_a_decode_worker_that_dies_before_its_echo_hands_the_same_ticket_to_another():
    world = World()
    world.submit()
    world.accept()
    first = world.last(DecodeStart)
    world.down(first)
    second = world.last(DecodeStart)
    assert second.address != first.address
    assert second.command.key == first.command.key._replace(placement=2)
    assert second.command.ticket == first.command.ticket


def test_a_decode_worker_that_dies_in_mid_stream_resumes_with_the_log():
    world = World()
    world.running()
    world.step(1, 101)
    world.down(world.last(DecodeStart))
    start = world.last(PrefillStart).command
    assert start.emitted == 2 and list(start.token_ids) == [*range(20), 100, 101]
    world.accept()
    world.first(PrefillStart, 102)
    world.first(DecodeStart, 102)
    world.step(3, 103, FinishReason.STOP)
    assert world.emitted == [100, 101, 102, 103]


def test_a_stale_ticket_and_a_failed_copy_count_against_the_link_and_start_over():
    for reason in (Reason.STALE_TICKET, Reason.COPY_FAILED):
        world = World()
        world.submit()
        world.accept()
        prefill, decode = world.last(PrefillStart), world.last(DecodeStart)
        failed = Failed(decode.command.key, reason, resumable=True)
        world.do(world.core.on_event(decode.address, Role.DECODE, failed, 0.0))
        assert world.core.links == {(prefill.address, decode.address): 1}
        assert (prefill.address, prefill.command.key) in world.cancels()
        assert world.last(PrefillStart).command.key.attempt == 2


def test_preemption_never_uses_up_the_attempts():
    world = World()
    world.running(max_tokens=50)
    for attempt in range(2, 12):
        decode = world.last(DecodeStart)
        failed = Failed(decode.command.key, Reason.OUT_OF_BLOCKS, resumable=True)
        world.do(world.core.on_event(decode.address, Role.DECODE, failed, world.now))
        for _ in range(30):
            world.tick()
        assert world.last(PrefillStart).command.key.attempt == attempt
        world.accept()
        for _ in range(30):
            world.tick()
        world.first(DecodeStart, 100 + attempt)
    assert not world.ends


def test_four_failures_end_the_request_with_what_it_emitted():
    world = World()
    world.running()
    for _ in range(4):
        decode = world.last(DecodeStart)
        failed = Failed(decode.command.key, Reason.COPY_FAILED, resumable=True)
        world.do(world.core.on_event(decode.address, Role.DECODE, failed, world.now))
        for _ in range(30):
            world.tick()
        if not world.ends:
            world.accept()
            for _ in range(30):
                world.tick()
    (end,) = world.ends
    assert end.outcome.code == "UNAVAILABLE"
    assert end.outcome.facts["tokens_emitted"] == "1" and end.outcome.facts["resumable"] == "true"


def test_a_refusal_goes_to_the_other_worker_and_then_waits_as_long_as_it_was_told():
    world = World()
    world.submit()
    first = world.last(PrefillStart)
    world.do(world.core.on_event(first.address, Role.PREFILL, Refused(first.command.key, Reason.QUEUE_FULL, 2.0), 0.0))
    second = world.last(PrefillStart)
    assert second.address != first.address
    refused = Refused(second.command.key, Reason.QUEUE_FULL, 3.0)
    world.do(world.core.on_event(second.address, Role.PREFILL, refused, 0.0))
    sent = len(world.sent)
    world.tick(1.9)
    assert len(world.sent) == sent
    world.tick(0.2)
    assert world.last(PrefillStart).address == first.address


def test_a_refusal_from_decode_reuses_the_ticket():
    world = World()
    world.submit()
    world.accept()
    first = world.last(DecodeStart)
    world.do(world.core.on_event(first.address, Role.DECODE, Refused(first.command.key, Reason.QUEUE_FULL, 2.0), 0.0))
    second = world.last(DecodeStart)
    assert second.address != first.address and second.command.ticket == first.command.ticket
    assert not world.cancels()


def test_cancel_and_deadline_reach_both_workers_and_end_once():
    for code in ("CANCELLED", "DEADLINE_EXCEEDED"):
        world = World()
        number = world.submit(deadline=5.0)
        world.accept()
        if code == "CANCELLED":
            world.do(world.core.cancel(number, 1.0))
        else:
            world.tick(5.0)
        assert {address for address, _ in world.cancels()} == {
            world.last(PrefillStart).address, world.last(DecodeStart).address
        }  # fmt: skip
        assert [end.outcome.code for end in world.ends] == [code]
        world.do(world.core.cancel(number, 9.0))
        world.first(PrefillStart, 100)
        assert len(world.ends) == 1 and not world.emitted and world.core.idle


def test_a_stop_string_ends_the_request_and_cancels_the_slot():
    world = World()
    number = world.running()
    world.do(world.core.stop(number, 1.0))
    assert world.ends[0].outcome.finish_reason is FinishReason.STOP and world.ends[0].outcome.code == "OK"
    assert [address for address, _ in world.cancels()] == [world.last(DecodeStart).address]
    assert world.ends[0].outcome.times.decode == 1.0, "its worker says nothing of it any more"


def test_a_worker_that_breaks_ends_the_request_with_an_error_id():
    world = World()
    world.running()
    decode = world.last(DecodeStart)
    failed = Failed(decode.command.key, Reason.INTERNAL, resumable=False, facts={"error_id": "abc"})
    world.do(world.core.on_event(decode.address, Role.DECODE, failed, 0.0))
    assert world.ends[0].outcome.code == "INTERNAL" and world.ends[0].outcome.facts["error_id"] == "abc"


def test_a_preempted_request_whose_client_does_not_read_starts_again_only_when_it_does():
    world = World(credit_window=4, slow_client=30.0)
    number = world.running(max_tokens=20)
    for index in range(1, 4):
        world.step(index, 100 + index)
    starts = len(world.sent)
    decode = world.last(DecodeStart)
    failed = Failed(decode.command.key, Reason.OUT_OF_BLOCKS, resumable=True)
    world.do(world.core.on_event(decode.address, Role.DECODE, failed, world.now))
    for _ in range(100):
        world.tick()
    assert len(world.sent) == starts, "an attempt would hold blocks for what nobody takes"
    world.do(world.core.consumed(number, 2, world.now))
    start = world.last(PrefillStart).command
    assert start.key.attempt == 2 and start.emitted == 4
    world.accept()
    assert world.last(DecodeStart).command.until_index == 6


def test_a_preempted_request_whose_client_never_reads_is_ended_in_time():
    world = World(credit_window=4, slow_client=30.0)
    world.running(max_tokens=20)
    for index in range(1, 4):
        world.step(index, 100 + index)
    decode = world.last(DecodeStart)
    failed = Failed(decode.command.key, Reason.OUT_OF_BLOCKS, resumable=True)
    world.do(world.core.on_event(decode.address, Role.DECODE, failed, world.now))
    world.tick(29.0)
    assert not world.ends
    world.tick(2.0)
    assert world.ends[0].outcome.code == "RESOURCE_EXHAUSTED" and world.core.idle


def test_credit_follows_the_reader_and_a_slow_one_is_ended():
    world = World(credit_window=4)
    number = world.running(max_tokens=100)
    for index in range(1, 4):
        world.step(index, index)
    world.do(world.core.consumed(number, 1, world.now))
    assert not [each for each in world.sent if isinstance(each.command, Credit)]
    world.do(world.core.consumed(number, 2, world.now))
    assert world.last(Credit).command.until_index == 6
    world.step(4, 4)
    world.step(5, 5)
    world.tick(29.0)
    assert not world.ends
    world.tick(1.1)
    assert world.ends[0].outcome.code == "RESOURCE_EXHAUSTED" and "slow consumer" in world.ends[0].outcome.sentence


def test_without_a_worker_a_request_waits_a_moment_and_then_hears_which_stage_is_missing():
    world = World(decode=())
    world.submit()
    world.tick(4.9)
    assert not world.ends and not world.sent
    world.tick(0.2)
    assert world.ends[0].outcome.code == "UNAVAILABLE" and world.ends[0].outcome.sentence == "no decode worker is up"


def test_a_running_request_outlives_the_restart_of_the_only_decode_worker():
    world = World(decode=("d1",))
    world.running()
    world.down(world.last(DecodeStart))
    world.accept()
    world.tick(20.0)
    world.do(world.core.worker_up("d1", Role.DECODE, hello("d1", 2), world.now))
    assert world.last(DecodeStart).command.key == world.last(PrefillStart).command.key._replace(placement=1)


def test_too_long_names_both_numbers_and_the_largest_that_fits():
    world = World()
    with pytest.raises(TooLong) as error:
        world.submit(prompt=1595, max_tokens=8)
    for number in ("1595", "8", "1600", "1592"):
        assert number in str(error.value)
    world.submit(prompt=1590, max_tokens=None)
    assert world.last(PrefillStart).command.params.max_tokens == 10


def test_a_request_that_came_before_any_worker_is_checked_when_they_are_up():
    world = World(prefill=(), decode=())
    world.submit(prompt=1595, max_tokens=8)
    world.submit(prompt=20, max_tokens=None)
    world.do(world.core.worker_up("p1", Role.PREFILL, hello("p1"), 1.0))
    world.do(world.core.worker_up("d1", Role.DECODE, hello("d1"), 1.0))
    assert [end.outcome.code for end in world.ends] == ["INVALID_ARGUMENT"]
    assert world.last(PrefillStart).command.params.max_tokens == 1580


def test_beyond_the_running_limit_requests_queue_and_beyond_the_queue_they_are_refused():
    world = World(max_concurrent_requests=1, max_queued_requests=1)
    first = world.submit()
    world.submit()
    assert len([each for each in world.sent if isinstance(each.command, PrefillStart)]) == 1
    with pytest.raises(Overloaded) as error:
        world.submit()
    assert error.value.retry_after > 0 and "1 running and" in str(error.value)
    world.do(world.core.cancel(first, 1.0))
    assert len([each for each in world.sent if isinstance(each.command, PrefillStart)]) == 2


def test_a_worker_of_another_layout_is_named_and_not_used():
    world = World(decode=())
    other = LAYOUT._replace(dtype="bfloat16", block_size=32)
    world.do(world.core.worker_up("d9", Role.DECODE, hello("d9", layout=other), 0.0))
    world.submit()
    world.tick(40.0)
    assert "d9 has another KV layout than p1: dtype is bfloat16, not float32" in world.ends[0].outcome.sentence
    assert "block_size is 32, not 16" in world.ends[0].outcome.sentence


def test_a_draining_worker_gets_nothing_new():
    world = World()
    world.do(world.core.on_event("d1", Role.DECODE, WorkerLoad(draining=True), 0.0))
    for _ in range(6):
        world.submit()
        world.accept()
        assert world.last(DecodeStart).address == "d2"


def test_a_session_that_comes_back_with_the_same_incarnation_was_no_death():
    world = World(prefill=("p1",))
    world.submit()
    for _ in range(9):
        world.down(world.last(PrefillStart))
        world.do(world.core.worker_up("p1", Role.PREFILL, hello("p1"), world.now))
        for _ in range(30):
            world.tick()
    assert not world.ends and world.last(PrefillStart).command.key.attempt == 10


def test_after_two_deaths_a_request_runs_where_nobody_else_is_and_fails_if_it_dies_alone():
    world = World()
    bad = world.running(max_tokens=50)
    for life in (2, 3):  # two decode workers go down under it
        start = world.last(DecodeStart)
        world.down(start)
        world.do(world.core.worker_up(start.address, Role.DECODE, hello(start.address, life), world.now))
        for _ in range(5):
            world.tick()
        if life == 2:
            world.accept()
            world.first(DecodeStart, 100 + life)
    suspect = world.last(PrefillStart)
    assert suspect.command.key.request == bad
    innocent = world.submit()
    assert world.last(PrefillStart).address != suspect.address
    world.do(world.core.on_event(suspect.address, Role.PREFILL, WorkerLoad(running=1), world.now + 0.01))
    world.down(suspect)
    assert [(end.request, end.outcome.code) for end in world.ends] == [(bad, "UNAVAILABLE")]
    assert "went down while they ran this request" in world.ends[0].outcome.sentence
    assert innocent in world.core.flows


def test_a_suspect_empties_a_worker_for_itself_when_ordinary_requests_are_everywhere():
    world = World(prefill=("p1", "p2", "p3"), decode=("d1",))
    bad = world.submit()
    world.down(world.last(PrefillStart))
    world.down(world.last(PrefillStart))
    assert len(world.core.flows[bad].deaths) == 2
    others = []
    for _ in range(2):
        world.do(world.core.worker_up("p1", Role.PREFILL, hello("p1", 9), world.now))
    others.append(world.submit())
    for _ in range(20):
        world.tick()
    assert world.last(PrefillStart).command.key.request in (bad, *others)
    for other in others:
        world.do(world.core.cancel(other, world.now))
    for _ in range(20):
        world.tick()
    assert world.core.flows[bad].legs
