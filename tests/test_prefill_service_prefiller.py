"""The prefill stage as its router and its pullers see it: a FakeRunner in a synchronous loop, no network, no clock."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.messages import (
    BlocksSealed,
    CacheChange,
    Cancel,
    Drain,
    Failed,
    FirstToken,
    KvLayout,
    Node,
    PrefillAccepted,
    PrefillStart,
    PullDone,
    PullOpen,
    PullOpened,
    PullRequest,
    PullWant,
    Reason,
    Refused,
    RequestKey,
    RouterHello,
    Ticket,
    WorkerLoad,
)
from engine.types import FinishReason, SamplingParams
from kvtransfer.actions import Action, ClosePull, HandOver, SendBlock, ToPuller, ToRouter
from prefill_service.prefiller import Prefiller

SIZE = 16
Event = TypeVar("Event")
NODE = Node("p", 7, "127.0.0.1:50061")
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=8)


class Worker:
    """A prefill worker whose device is a FakeRunner: drives the core as a servicer would, one call after the other."""

    def __init__(self, blocks: int = 16, eos: tuple[int, ...] = (), digests: bool = True, **config: Any) -> None:
        self.runner = FakeRunner(SIZE, blocks, eos_token_ids=eos)
        self.config = EngineConfig(block_size=SIZE, num_blocks=blocks, **{"max_num_batched_tokens": 32, **config})
        self.pool = BlockPool(blocks)
        self.core = Prefiller(
            NODE, self.runner.layout, self.config, self.pool, vocab_size=self.runner.vocab_size,
            eos_token_ids=eos, rng=random.Random(3), digests=digests, max_waiting=4,
        )  # fmt: skip
        self.now = 100.0
        self.events: dict[int, list[object]] = defaultdict(list)  # by session
        self.pulled: dict[int, list[object]] = defaultdict(list)  # by pull
        self.bytes: dict[int, dict[int, bytes]] = defaultdict(dict)  # pull -> position -> bytes
        self.closed: list[int] = []
        self.batches: list[int] = []  # tokens of each step
        self.attach(1)

    def apply(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case ToRouter():
                    self.events[action.session].append(action.event)
                case ToPuller():
                    self.pulled[action.pull].append(action.event)
                case SendBlock():
                    self.bytes[action.pull][action.handle.position] = self.runner.read_block(action.handle.id)
                    self.apply(self.core.sent(action.pull, action.handle.position, self.now))
                case ClosePull():
                    self.closed.append(action.pull)
                case HandOver():
                    self.pool.give(action.blocks)
                case _:
                    raise AssertionError(f"unexpected action {action}")
        self.core.audit()
        return actions

    def attach(self, session: int, router: str = "r", incarnation: int = 1) -> list[Action]:
        return self.apply(self.core.attach(session, RouterHello(router, incarnation, session), self.now))

    def start(self, request: int, tokens: list[int] | range, session: int = 1, **fields: Any) -> list[Action]:
        values: dict[str, Any] = {"emitted": 0, "params": GREEDY, "deadline": 60.0, "age": 0.0, **fields}
        start = PrefillStart(RequestKey(request, 1), tuple(tokens), **values)
        return self.apply(self.core.on_command(session, start, self.now))

    def cancel(self, request: int, session: int = 1) -> list[Action]:
        return self.apply(self.core.on_command(session, Cancel(RequestKey(request, 1)), self.now))

    def step(self) -> bool:
        batch = self.core.next_batch(self.now)
        if batch is None:
            return False
        self.batches.append(batch.num_tokens)
        self.apply(self.core.on_step(self.runner.step(batch), self.now))
        return True

    def run(self) -> None:
        while self.step():
            pass

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.core.tick(self.now))

    def pull(self, pull: int, request: int, placement: int = 1, session: int = 1, transport: str = "grpc") -> None:
        """Opens a Pull, and asks for all its blocks."""
        ticket = self.ticket(request, session)
        key = RequestKey(request, 1, placement)
        digest = self.core.outbox.layout_digest
        self.say(pull, PullOpen(ticket.id, key, NODE.incarnation, transport, digest))
        if transport == "grpc":
            self.say(pull, PullWant(range(ticket.num_blocks)))

    def say(self, pull: int, message: PullRequest) -> None:
        self.apply(self.core.pull_message(pull, message, self.now))

    def ticket(self, request: int, session: int = 1) -> Ticket:
        return next(e.ticket for e in self.of(PrefillAccepted, session) if e.key.request == request)

    def of(self, kind: type[Event], session: int = 1) -> list[Event]:
        return [event for event in self.events[session] if isinstance(event, kind)]

    def first(self, request: int, session: int = 1) -> FirstToken:
        (event,) = [e for e in self.of(FirstToken, session) if e.key.request == request]
        return event


def prompt(length: int, salt: int = 0) -> list[int]:
    return random.Random(length * 1000 + salt).choices(range(1000), k=length)


# ---- the ordinary life of a request ---------------------------------------------------------------------------


def test_a_prompt_is_accepted_at_once_and_its_first_token_is_right() -> None:
    worker = Worker()
    worker.start(1, prompt(40))
    accepted = worker.of(PrefillAccepted)[0]
    assert (accepted.ticket.num_tokens, accepted.ticket.num_blocks, accepted.cached_tokens) == (40, 3, 0)
    assert len(accepted.ticket.block_hashes) == 2
    worker.run()
    assert worker.first(1).token.token_id == fake_tokens(prompt(40), 1)[0]
    assert worker.first(1).finish_reason is None
    assert worker.batches == [32, 8]


def test_blocks_are_announced_as_chunks_end_and_the_puller_gets_their_bytes() -> None:
    worker = Worker()
    worker.start(1, prompt(70))
    worker.pull(5, 1)
    assert worker.pulled[5] == [PullOpened(worker.core.outbox.layout_digest)]
    announced = []
    while worker.step():
        announced.append([h.position for e in worker.pulled[5] if isinstance(e, BlocksSealed) for h in e.blocks])
    assert announced == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert worker.pulled[5][-1] == worker.first(1)
    reader = FakeRunner(SIZE, 8)
    for event in worker.pulled[5]:
        for handle in event.blocks if isinstance(event, BlocksSealed) else ():
            reader.write_block(handle.position, worker.bytes[5][handle.position])
            tokens = prompt(70)[handle.position * SIZE : (handle.position + 1) * SIZE]
            assert reader.cache.digest(handle.position, handle.position, tokens) == handle.digest
    worker.say(5, PullDone())
    assert worker.core.idle and worker.closed == [5]
    assert worker.pool.available == 16


def test_a_pull_that_opens_late_gets_everything_again() -> None:
    worker = Worker()
    worker.start(1, prompt(40))
    worker.run()
    worker.pull(5, 1)
    worker.pull(6, 1, placement=2)
    assert worker.bytes[5] == worker.bytes[6] and len(worker.bytes[6]) == 3
    assert 5 in worker.closed and any(isinstance(e, Failed) for e in worker.pulled[5])
    worker.say(6, PullDone())
    assert worker.core.idle


def test_many_prompts_share_one_step() -> None:
    worker = Worker(max_num_batched_tokens=64)
    for request in range(3):
        worker.start(request, prompt(10, request))
    worker.step()
    assert worker.batches == [30]
    assert {e.key.request for e in worker.of(FirstToken)} == {0, 1, 2}


def test_the_oldest_request_is_computed_first_whenever_it_arrives() -> None:
    worker = Worker(max_num_batched_tokens=16)
    worker.start(1, prompt(32), age=0.0)
    worker.start(2, prompt(32, 2), age=5.0)
    worker.run()
    assert [e.key.request for e in worker.of(FirstToken)] == [2, 1]


def test_a_cached_prefix_is_not_computed_again_and_is_announced_at_once() -> None:
    worker = Worker()
    worker.start(1, prompt(40))
    worker.run()
    worker.batches.clear()
    worker.start(2, prompt(40) + [1, 2, 3])
    assert worker.of(PrefillAccepted)[-1].cached_tokens == 32
    worker.pull(9, 2)
    assert [h.position for h in worker.pulled[9][-1].blocks] == [0, 1]  # type: ignore[attr-defined]
    worker.run()
    assert worker.batches == [11]
    assert worker.first(2).token.token_id == fake_tokens(prompt(40) + [1, 2, 3], 1)[0]
    assert len(worker.bytes[9]) == 3


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    worker = Worker()
    worker.start(1, prompt(32))
    worker.run()
    worker.start(2, prompt(32))
    assert worker.of(PrefillAccepted)[-1].cached_tokens == 16
    worker.run()
    assert worker.first(2).token == worker.first(1).token


def test_another_namespace_shares_nothing() -> None:
    worker = Worker()
    worker.start(1, prompt(40))
    worker.run()
    worker.start(2, prompt(40), cache_namespace=b"other")
    assert worker.of(PrefillAccepted)[-1].cached_tokens == 0


def test_prompt_logprobs_cover_every_prompt_token_and_skip_the_cache() -> None:
    worker = Worker(max_num_batched_tokens=16)
    worker.start(1, prompt(40))
    worker.run()
    worker.start(2, prompt(40), params=replace(GREEDY, prompt_logprobs=1))
    assert worker.of(PrefillAccepted)[-1].cached_tokens == 0
    worker.run()
    logprobs = worker.first(2).prompt_logprobs
    assert [each.token_id for each in logprobs] == prompt(40)
    assert logprobs[0].logprob is None and all(each.logprob is not None for each in logprobs[1:])


def test_a_resumed_request_continues_at_the_next_index() -> None:
    worker = Worker()
    tokens = fake_tokens(prompt(20), 4)
    worker.start(1, prompt(20) + tokens[:3], emitted=3)
    worker.run()
    token = worker.first(1).token
    assert (token.index, token.token_id) == (3, tokens[3])


def test_an_end_token_at_index_0_ends_the_request_and_an_open_pull_still_gets_it() -> None:
    end = fake_tokens(prompt(20), 1)[0]
    worker = Worker(eos=(end,))
    worker.start(1, prompt(20))
    worker.pull(5, 1)
    worker.run()
    assert worker.first(1).finish_reason is FinishReason.STOP
    assert worker.first(1) in worker.pulled[5]
    assert worker.core.idle


def test_one_remaining_token_ends_with_length_and_frees_its_blocks() -> None:
    worker = Worker()
    worker.start(1, prompt(20), params=replace(GREEDY, max_tokens=1))
    worker.run()
    assert worker.first(1).finish_reason is FinishReason.LENGTH
    assert worker.core.idle


def test_the_local_transport_hands_the_blocks_over() -> None:
    worker = Worker(digests=False)
    worker.start(1, prompt(20))
    worker.pull(-5, 1, transport="local")
    worker.run()
    worker.say(-5, PullDone())
    assert worker.core.idle and worker.pool.available == 16


# ---- refusals -------------------------------------------------------------------------------------------------


def test_a_prompt_that_never_fits_the_pool_is_refused_with_the_numbers() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(65))
    (refused,) = worker.of(Refused)
    assert refused.reason is Reason.OUT_OF_BLOCKS
    assert refused.facts == {"needed_blocks": "5", "total_blocks": "4", "largest": "64"}
    assert worker.core.idle


@pytest.mark.parametrize(
    ("tokens", "fields", "field"),
    [
        (prompt(64), {}, "prompt"),
        ([1, 1000], {}, "token_ids"),
        ([1, -1], {}, "token_ids"),
        ([1, 1 << 40], {}, "token_ids"),
        ([], {}, "emitted"),
        ([1], {"emitted": 1}, "emitted"),
        ([1, 2, 3], {"emitted": 2, "params": replace(GREEDY, max_tokens=2)}, "max_tokens"),
        ([1], {"params": replace(GREEDY, seed=None)}, "seed"),
    ],
)
def test_an_invalid_start_is_refused_by_the_name_of_its_field(
    tokens: list[int], fields: dict[str, Any], field: str
) -> None:
    worker = Worker(max_model_len=64)
    worker.start(1, tokens, **fields)
    (refused,) = worker.of(Refused)
    assert refused.reason is Reason.INVALID_FIELD and refused.facts["field"] == field
    assert worker.core.idle


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    worker = Worker(blocks=2)
    for request in range(6):
        worker.start(request, prompt(32, request))
    (refused,) = worker.of(Refused)
    assert refused.reason is Reason.QUEUE_FULL and refused.key.request == 5
    assert refused.retry_after > 0 and refused.facts["waiting"] == refused.facts["limit"] == "4"


def test_the_oldest_waiting_request_is_not_passed_by_small_ones() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(40))
    worker.start(2, prompt(60, 2), age=1.0)
    worker.start(3, prompt(5, 3))
    assert [e.key.request for e in worker.of(PrefillAccepted)] == [1]
    worker.run()
    worker.cancel(1)
    assert [e.key.request for e in worker.of(PrefillAccepted)] == [1, 2]


def test_undelivered_tickets_count_against_the_pool() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(60))
    worker.run()
    worker.start(2, prompt(10, 2))
    assert worker.core.load().waiting == 1 and worker.core.load().leased_blocks == 4
    worker.pull(5, 1)
    worker.say(5, PullDone())
    assert [e.key.request for e in worker.of(PrefillAccepted)] == [1, 2]


def test_promises_of_a_decode_stage_on_the_same_pool_are_kept() -> None:
    worker = Worker(blocks=4)
    worker.core.promised = 2
    worker.start(1, prompt(40))
    assert not worker.of(PrefillAccepted)
    worker.core.promised, worker.core.stalled = 0, True
    worker.tick(0.25)
    assert not worker.of(PrefillAccepted)
    worker.core.stalled = False
    worker.tick(0.25)
    assert worker.of(PrefillAccepted)


# ---- the end of a job -----------------------------------------------------------------------------------------


def test_a_cancelled_prompt_keeps_its_blocks_until_its_step_has_ended() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(60))
    batch = worker.core.next_batch(worker.now)
    assert batch is not None
    worker.cancel(1)
    worker.start(2, prompt(60, 2))
    assert worker.pool.available == 0 and not [e for e in worker.of(PrefillAccepted) if e.key.request == 2]
    assert worker.core.next_batch(worker.now) is None
    worker.apply(worker.core.on_step(worker.runner.step(batch), worker.now))
    assert worker.of(PrefillAccepted)[-1].key.request == 2
    worker.run()
    assert worker.first(2).token.token_id == fake_tokens(prompt(60, 2), 1)[0]
    assert not [e for e in worker.of(FirstToken) if e.key.request == 1]


def test_a_cancel_before_its_start_keeps_the_late_start_out() -> None:
    worker = Worker()
    worker.cancel(1)
    assert worker.start(1, prompt(10)) == []
    assert worker.core.idle and worker.core.ignored == {"unknown_cancel": 1, "start_after_end": 1}
    worker.tick(121)
    worker.start(1, prompt(10))
    assert worker.of(PrefillAccepted)


def test_a_repeated_start_is_counted_and_changes_nothing() -> None:
    worker = Worker()
    worker.start(1, prompt(10))
    assert worker.start(1, prompt(10)) == []
    worker.run()
    worker.pull(5, 1)
    worker.say(5, PullDone())
    assert worker.start(1, prompt(10)) == []
    assert worker.core.ignored["duplicate_start"] == 1 and worker.core.idle


def test_a_session_that_ends_takes_its_own_jobs_along_and_no_others() -> None:
    worker = Worker()
    worker.attach(2, router="other")
    worker.start(1, prompt(20))
    worker.start(1, prompt(20, 1), session=2)
    worker.apply(worker.core.detach(1, worker.now))
    worker.run()
    assert not worker.of(FirstToken) and worker.first(1, session=2)
    assert len(worker.core.outbox) == 1


def test_a_newer_session_of_the_same_router_ends_the_older_one() -> None:
    worker = Worker()
    worker.start(1, prompt(20))
    worker.attach(2)
    assert worker.core.idle and list(worker.core.sessions) == [2]
    assert worker.attach(1) == []
    assert worker.start(3, prompt(10)) == []


def test_a_deadline_fails_waiting_and_filling_jobs_and_frees_a_lease() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(40), deadline=10.0)
    worker.start(2, prompt(40, 2), deadline=10.0)
    worker.tick(10)
    assert {(e.key.request, e.reason, e.resumable) for e in worker.of(Failed)} == {
        (1, Reason.DEADLINE, False),
        (2, Reason.DEADLINE, False),
    }
    worker.start(3, prompt(40, 3), deadline=10.0)
    worker.run()
    worker.tick(10)
    assert worker.core.idle and len(worker.of(Failed)) == 2


def test_a_ticket_that_nobody_pulls_is_freed_after_a_minute() -> None:
    worker = Worker()
    worker.start(1, prompt(20), deadline=600.0)
    worker.run()
    worker.tick(59)
    assert not worker.core.idle and worker.core.expired_leases == 0
    worker.tick(2)
    assert worker.core.idle and worker.core.expired_leases == 1


def test_a_failed_step_fails_its_own_requests_only() -> None:
    worker = Worker(max_num_batched_tokens=16)
    worker.start(1, prompt(16))
    worker.start(2, prompt(16, 2))
    assert worker.core.next_batch(worker.now)
    worker.apply(worker.core.step_failed({"error_id": "e1"}, worker.now))
    (failed,) = worker.of(Failed)
    assert (failed.key.request, failed.reason, failed.facts) == (1, Reason.INTERNAL, {"error_id": "e1"})
    worker.run()
    assert worker.first(2).token.token_id == fake_tokens(prompt(16, 2), 1)[0]


def test_draining_refuses_new_work_and_finishes_what_was_accepted() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(60))
    worker.start(2, prompt(60, 2))
    worker.apply(worker.core.on_command(1, Drain(30.0), worker.now))
    worker.start(3, prompt(5))
    assert [(e.key.request, e.reason) for e in worker.of(Refused)] == [(2, Reason.DRAINING), (3, Reason.DRAINING)]
    worker.run()
    assert worker.first(1) and not worker.core.idle
    worker.tick(1)
    assert worker.of(WorkerLoad)[-1].draining
    worker.pull(5, 1)
    worker.say(5, PullDone())
    assert worker.core.idle


def test_at_the_end_of_grace_what_is_left_fails_resumable() -> None:
    worker = Worker()
    worker.start(1, prompt(40))
    worker.step()
    worker.apply(worker.core.drain(5.0, worker.now))
    worker.tick(5)
    (failed,) = worker.of(Failed)
    assert failed.reason is Reason.DRAINING and failed.resumable
    assert worker.core.idle


def test_sessions_learn_which_hashes_are_cached_and_which_are_gone() -> None:
    worker = Worker(blocks=4)
    worker.start(1, prompt(40))
    worker.run()
    hashes = list(worker.ticket(1).block_hashes)
    sealed = [digest for change in worker.of(CacheChange) for digest in change.sealed]
    assert sealed == hashes
    worker.attach(2, router="other")
    assert [list(c.sealed) for c in worker.of(CacheChange, 2)] == [hashes]
    worker.cancel(1)
    worker.start(2, prompt(60, 2))
    worker.run()
    assert set(hashes) <= {digest for change in worker.of(CacheChange) for digest in change.evicted}
    assert [c.sequence for c in worker.of(CacheChange)] == list(range(1, 1 + len(worker.of(CacheChange))))


# ---- anything at any time -------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(4, 16), budget=st.sampled_from([7, 16, 50]))
def test_no_block_leaks_and_every_token_is_right_whatever_happens(seed: int, blocks: int, budget: int) -> None:
    """Random starts, cancels, pulls, steps and session ends; the pool is audited after every action."""
    rng = random.Random(seed)
    worker = Worker(blocks, max_num_batched_tokens=budget, max_num_seqs=3)
    worker.attach(2, router="other")
    prompts: dict[tuple[int, int], list[int]] = {}
    pulls = 0
    pending = None
    shared = prompt(32)
    for request in range(60):
        worker.now += rng.random()
        kind = rng.choice(
            ["start", "start", "begin", "end", "end", "pull", "done", "close", "cancel", "tick", "detach"]
        )
        session = rng.choice(list(worker.core.sessions) or [1])
        accepted = [(s, e.key.request) for s in (1, 2) for e in worker.of(PrefillAccepted, s)]
        if kind == "start":
            tokens = shared[: rng.choice([0, 16, 32])] + prompt(rng.randint(1, 40), rng.randrange(3))
            prompts[session, request] = tokens
            params = replace(GREEDY, max_tokens=rng.choice([1, 8]))
            worker.start(
                request, tokens, session, age=rng.random() * 5, deadline=rng.choice([3.0, 100.0]), params=params
            )
        elif kind == "begin" and pending is None:
            pending = worker.core.next_batch(worker.now)
        elif kind == "end" and pending is not None:
            output = worker.runner.step(pending)
            pending = None
            worker.apply(worker.core.on_step(output, worker.now))
        elif kind == "pull" and accepted:
            pulls += 1
            owner, wanted = rng.choice(accepted)
            worker.pull(pulls, wanted, rng.randint(1, 3), owner)
        elif kind == "done" and pulls:
            worker.say(rng.randint(1, pulls), PullDone())
        elif kind == "close" and pulls:
            worker.apply(worker.core.pull_closed(rng.randint(1, pulls), worker.now))
        elif kind == "cancel":
            worker.cancel(rng.randint(0, request), session)
        elif kind == "tick":
            worker.tick(rng.random())
        elif kind == "detach" and rng.random() < 0.1:
            worker.apply(worker.core.detach(session, worker.now))
    if pending is not None:
        worker.apply(worker.core.on_step(worker.runner.step(pending), worker.now))
    for _ in range(50):
        worker.run()
        worker.tick(3.0)
    assert worker.core.idle and worker.pool.ledger()["referenced"] == 0
    for session in (1, 2):
        for event in worker.of(FirstToken, session):
            assert event.token.token_id == fake_tokens(prompts[session, event.key.request], 1)[0]


def test_every_accepted_prompt_ends_in_a_small_pool() -> None:
    worker = Worker(blocks=6, max_num_batched_tokens=24)
    rng = random.Random(5)
    done: set[int] = set()
    for request in range(40):
        while worker.core.load().waiting >= 4:
            worker.step()
            for event in worker.of(FirstToken):
                if event.key.request not in done:
                    done.add(event.key.request)
                    worker.pull(event.key.request, event.key.request)
                    worker.say(event.key.request, PullDone())
        worker.start(request, prompt(rng.randint(1, 90), request))
    worker.run()
    assert not worker.of(Refused) and not worker.of(Failed)


def test_a_layout_of_another_model_has_another_hash_root() -> None:
    layout = KvLayout(b"m", "float32", 16, 1, 1, 1, 128, "n")
    first, second = Worker(), Worker()
    second.core.layout = layout
    first.start(1, prompt(40))
    second.start(1, prompt(40))
    assert first.ticket(1).block_hashes != second.ticket(1).block_hashes
