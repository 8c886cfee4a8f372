"""One flow alone, told everything that workers could ever say, in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import (
    Failed,
    Finish,
    FirstToken,
    Node,
    PrefillAccepted,
    Reason,
    Refused,
    RequestKey,
    StageTimes,
    Ticket,
    TokenLogprob,
)
from engine.types import FinishReason, SamplingParams, Token
from router.actions import Emit, End, FlowAction, RouterRequest, ToWorker
from router.admission import RouterConfig
from router.flow import Flow
from router.workers import Role

TICKET = Ticket(1, Node("p1", 1, "p1"), 3, 1, 60.0)


def flow(max_tokens: int = 6, resume: tuple[int, ...] = ()) -> Flow:
    request = RouterRequest([1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=1), 100.0, resume=resume)
    return Flow(9, request, RouterConfig(), random.Random(1), 0.0)


def accepted(each: Flow) -> Flow:
    each.start_prefill("p1", 0.0)
    each.accepted("p1", PrefillAccepted(RequestKey(9, 1), TICKET, 0), 0.0)
    return each


def test_a_token_from_another_worker_attempt_placement_or_index_is_dropped() -> None:
    each = accepted(flow())
    each.start_decode("d1", 0.0)
    token = Token(0, 5)
    assert not each.row("d2", RequestKey(9, 1, 1), token, 0.0)
    assert not each.row("d1", RequestKey(9, 2, 1), token, 0.0)
    assert not each.row("d1", RequestKey(9, 1, 2), token, 0.0)
    assert each.row("d1", RequestKey(9, 1, 1), token, 0.0)
    assert not each.row("d1", RequestKey(9, 1, 1), token, 0.0)
    assert each.log == [5] and each.ignored == {"Row": 4}


def test_a_gap_ends_the_attempt_because_a_message_was_lost() -> None:
    each = accepted(flow())
    each.start_decode("d1", 0.0)
    each.row("d1", RequestKey(9, 1, 1), Token(0, 5), 0.0)
    (cancel,) = each.row("d1", RequestKey(9, 1, 1), Token(2, 5), 0.0)
    assert isinstance(cancel, ToWorker) and each.wants is Role.PREFILL and each.failed_copies == 1


def test_prompt_logprobs_come_once_and_only_for_the_prompt() -> None:
    each = accepted(flow())
    logprobs = [TokenLogprob(i, -1.0, 1) for i in range(5)]
    first = FirstToken(RequestKey(9, 1), Token(0, 5), prompt_logprobs=logprobs)
    (emit,) = each.first_token("p1", Role.PREFILL, first, 0.0)
    assert isinstance(emit, Emit) and len(emit.prompt_logprobs) == 3
    each.worker_lost("p1", Role.PREFILL, 1, 1.0, alone=False, heard_at=1.0)
    each.start_prefill("p2", 0.0)
    again = FirstToken(RequestKey(9, 2), Token(1, 6), prompt_logprobs=logprobs)
    (emit,) = each.first_token("p2", Role.PREFILL, again, 0.0)
    assert isinstance(emit, Emit) and not emit.prompt_logprobs


def test_a_client_that_resumes_goes_on_at_its_next_index() -> None:
    each = flow(resume=(7, 8))
    (start,) = each.start_prefill("p1", 0.0)
    assert isinstance(start, ToWorker) and start.command.emitted == 2 and start.command.token_ids == [1, 2, 3, 7, 8]
    each.accepted("p1", PrefillAccepted(RequestKey(9, 1), TICKET, 0), 0.0)
    (emit,) = each.first_token("p1", Role.PREFILL, FirstToken(RequestKey(9, 1), Token(2, 9)), 0.0)
    assert isinstance(emit, Emit) and emit.tokens == (Token(2, 9),)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.DEADLINE, "DEADLINE_EXCEEDED"),
        (Reason.INVALID_FIELD, "INVALID_ARGUMENT"),
        (Reason.UNIMPLEMENTED, "UNIMPLEMENTED"),
        (Reason.OUT_OF_BLOCKS, "RESOURCE_EXHAUSTED"),
        (Reason.INTERNAL, "INTERNAL"),
    ],
)
def test_a_final_failure_has_a_status_and_cancels_the_other_leg(reason: Reason, code: str) -> None:
    each = accepted(flow())
    each.start_decode("d1", 0.0)
    cancel, end = each.failed("d1", Role.DECODE, Failed(RequestKey(9, 1, 1), reason, False), 0.0)
    assert isinstance(cancel, ToWorker) and cancel.address == "p1"
    assert isinstance(end, End) and end.outcome.code == code and end.outcome.reason is reason


def test_a_stale_ticket_after_a_death_counts_once() -> None:
    each = accepted(flow())
    each.start_decode("d1", 0.0)
    each.worker_lost("d1", Role.DECODE, 1, 1.0, alone=False, heard_at=1.0)
    each.start_decode("d2", 0.0)
    each.failed("d2", Role.DECODE, Failed(RequestKey(9, 1, 2), Reason.STALE_TICKET, True), 0.0)
    assert each.attempt == 1 and each.wants is Role.PREFILL
    assert len(each.deaths) == 1 and each.failed_copies == 0


REASONS = st.sampled_from(list(Reason))
INTS = st.integers(0, 3)
ADDRESSES = st.sampled_from(["p1", "p2", "d1", "d2"])
KEYS = st.builds(RequestKey, st.just(9), INTS, INTS)
STEPS = st.one_of(
    st.tuples(st.just("accepted"), KEYS),
    st.tuples(st.just("first"), KEYS, st.sampled_from(list(Role)), st.integers(0, 6), st.booleans()),
    st.tuples(st.just("row"), KEYS, st.integers(0, 6)),
    st.tuples(st.just("finish"), KEYS),
    st.tuples(st.just("refused"), KEYS, st.sampled_from(list(Role)), REASONS),
    st.tuples(st.just("failed"), KEYS, st.sampled_from(list(Role)), REASONS, st.booleans()),
    st.tuples(st.just("lost"), st.sampled_from(list(Role)), INTS),
    st.tuples(st.just("consumed"), st.integers(0, 9)),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("tick"), st.floats(0, 20)),
)


class Told:
    """Carries one generated step into a flow, mostly as the worker that it is placed on would."""

    def __init__(self) -> None:
        self.flow = flow()
        self.now = 0.0

    def place(self) -> list[FlowAction]:
        if self.flow.wants is Role.PREFILL:
            return self.flow.start_prefill("p1", self.now)
        return self.flow.start_decode("d1", self.now) if self.flow.wants is Role.DECODE else []

    def tell(self, address: str, step: tuple) -> list[FlowAction]:
        each, now = self.flow, self.now
        match step:
            case ("accepted", key):
                return each.accepted(address, PrefillAccepted(key, TICKET, 0), now)
            case ("first", key, role, index, ends):
                finish = FinishReason.STOP if ends else None
                return each.first_token(address, role, FirstToken(key, Token(index, 5), finish), now)
            case ("row", key, index):
                return each.row(address, key, Token(index, 5), now)
            case ("finish", key):
                return each.finished(address, Finish(key, FinishReason.STOP, None, StageTimes()), now)
            case ("refused", key, role, reason):
                return each.refused(address, role, Refused(key, reason), now)
            case ("failed", key, role, reason, resumable):
                return each.failed(address, role, Failed(key, reason, resumable), now)
            case ("lost", role, incarnation):
                return each.worker_lost(address, role, incarnation, now, alone=False, heard_at=now)
            case ("consumed", index):
                return each.consumed_to(index, now)
            case ("cancel",):
                return each.cancel(now)
            case ("tick", seconds):
                self.now += seconds
                return each.tick(self.now)
        raise AssertionError(step)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(ADDRESSES, STEPS), max_size=40))
def test_whatever_is_said_tokens_come_in_order_and_the_end_once(steps: list[tuple[str, tuple]]) -> None:
    told = Told()
    next_index, ended = 0, False
    for address, step in steps:
        for action in [*told.place(), *told.tell(address, step)]:
            assert not ended, f"{action} after the end"
            if isinstance(action, Emit):
                for token in action.tokens:
                    assert token.index == next_index
                    next_index += 1
            ended = ended or isinstance(action, End)
        assert told.flow.ended == ended
        assert ended or told.flow.legs or told.flow.wants, "nothing will ever move it"
        assert len(told.flow.log) == next_index
