"""The decode stage as its router and the owners of blocks see it: no network, no clock, FakeRunners for devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_service.decoder import MOST_PATHS
from engine.fake_runner import fake_tokens
from engine.messages import (
    BlockHandle,
    BlocksSealed,
    Cancel,
    Credit,
    DecodeStart,
    Drain,
    Failed,
    FirstToken,
    Heartbeat,
    PullOpen,
    Reason,
    Refused,
    RequestKey,
    RouterHello,
    StepBatch,
    WorkerLoad,
)
from engine.types import FinishReason, Token
from kvtransfer.actions import CloseStream, OpenPull, ToOwner, ToRouter
from tests.decode_world import NODE, SIZE, World


def events(world: World, kind: type) -> list:
    return [event for event in world.events if isinstance(event, kind)]


def tokens(world: World) -> list[int]:
    return [row.token.token_id for batch in events(world, StepBatch) for row in batch.rows]


def start_of(world: World, prompt: list[int], max_tokens: int = 8, key: RequestKey | None = None) -> DecodeStart:
    """A start for a ticket that the owner has, which is not sent yet."""
    key = key or RequestKey(len(world.requests) + 1, 1, 1)
    request = world.submit(prompt, max_tokens)
    command = world.decode_start(request, world.owner.outbox._leases[request.ticket].ticket)
    world.command(Cancel(request.key))
    world.transfer()
    world.requests[request.id].over = True
    return replace(command, key=key)


def arrived(world: World, prompt: list[int], max_tokens: int = 8, **more: int) -> None:
    world.submit(prompt, max_tokens, **more)
    world.transfer()


# ---- from DecodeStart to the first step ---------------------------------------------------------------------------


def test_a_request_runs_from_ticket_to_last_token() -> None:
    world = World(8)
    arrived(world, [1, 2, 3, 4, 5], 6)
    world.finish()
    assert world.requests[1].log == fake_tokens([1, 2, 3, 4, 5], 6)
    assert len(events(world, FirstToken)) == 1 and len(events(world, StepBatch)) == 5


def test_the_pull_is_opened_at_once_even_while_the_request_waits() -> None:
    world = World(2)
    world.submit(range(7), 2)
    assert len(world.links) == 1
    world.submit(range(7), 2)
    assert world.core.load().waiting == 2 and len(world.core.scheduler.waiting) == 1
    assert len(world.links) == 2
    assert isinstance(world.links[2].to_owner[0], PullOpen)
    world.finish()


def test_nothing_is_asked_for_without_a_destination() -> None:
    world = World(3)
    world.submit(range(7), 4)
    world.submit(range(20, 27), 4)
    waiting = world.requests[2]
    for _ in range(3):
        world.advance(waiting.ticket)
        world.deliver(2)
    assert not world.links[2].to_owner, "a waiting request wants nothing"
    world.finish()


def test_the_echo_of_token_0_comes_before_token_1_under_the_placements_key() -> None:
    world = World(8)
    arrived(world, [1, 2, 3], 4)
    (echo,) = world.events
    assert isinstance(echo, FirstToken)
    assert echo.key == RequestKey(1, 1, 1) and echo.token == Token(0, fake_tokens([1, 2, 3], 1)[0])
    world.step()
    assert isinstance(world.events[1], StepBatch) and world.events[1].rows[0].token.index == 1


def test_however_often_a_path_is_proved_again_a_worker_tells_of_the_newest_alone() -> None:
    world = World(16)
    for number in range(20):
        world.submit([number, 1, 2, 3, 4], 4)
        pull = max(world.links)
        world.core.reroute(pull, "grpc", f"grpc (memfd: 0.{number:02} GB/s, and --min-transfer-gbps asks for 1)")
        world.finish()
    told = world.core.load().kv_path.split("), ")
    assert len(told) == MOST_PATHS and "0.19 GB/s" in told[-1]


def test_a_slot_joins_the_very_next_step() -> None:
    world = World(16)
    arrived(world, [1, 2, 3], 20)
    world.step()
    assert world.launch()
    arrived(world, [4, 5, 6], 20)  # lands while a step is in flight
    world.land()
    world.step()
    assert [len(batch.rows) for batch in events(world, StepBatch)] == [1, 1, 2]


def test_token_0_that_ends_the_request_is_all_that_comes() -> None:
    (first,) = fake_tokens([1, 2, 3], 1)
    world = World(8, eos=[first])
    arrived(world, [1, 2, 3], 8)
    (echo,) = world.events
    assert isinstance(echo, FirstToken) and echo.finish_reason is FinishReason.STOP
    assert not world.step()
    world.idle()


def test_a_last_token_and_its_finish_share_a_message() -> None:
    world = World(16)
    arrived(world, [1, 2, 3], 3)
    arrived(world, [4, 5, 6], 9)
    world.finish()
    for batch in events(world, StepBatch):
        for finish in batch.finishes:
            assert finish.key in [row.key for row in batch.rows]
    assert [finish.reason for batch in events(world, StepBatch) for finish in batch.finishes] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]


def test_a_stop_token_is_named_and_stage_times_are_told() -> None:
    expected = fake_tokens([1, 2, 3], 8)
    world = World(8)
    world.submit([1, 2, 3], 8, stop_token_ids=(expected[3],))
    world.now += 1.0
    world.transfer()
    world.now += 2.0
    while not world.requests[1].over:
        world.step()
    (finish,) = [finish for batch in events(world, StepBatch) for finish in batch.finishes]
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, expected[3])
    assert (finish.times.queued, finish.times.transferred, finish.times.computed) == pytest.approx((0.0, 1.0, 2.0))


def test_each_session_gets_one_message_per_step_with_its_own_rows() -> None:
    world = World(16)
    world.apply(world.core.attach(2, RouterHello("other", 6, 1), world.now))
    arrived(world, [1, 2, 3], 8)
    start = start_of(world, [4, 5, 6], key=RequestKey(1, 1, 1))
    ticket = world.owner.offer(RequestKey(1, 1), [4, 5, 6], 0, start.params, world.now)
    world.apply(world.core.on_command(2, replace(start, ticket=ticket), world.now))
    heard: list[tuple[int, object]] = []
    world.on_event = lambda event: None  # type: ignore[method-assign]
    world.transfer()
    batch = world.core.next_batch(world.now)
    assert batch is not None and len(batch.rows) == 2
    for action in world.core.on_step(world.runner.step(batch), world.now):
        assert isinstance(action, ToRouter)
        heard.append((action.session, action.event))
    assert sorted(session for session, _ in heard) == [1, 2]
    assert all(isinstance(event, StepBatch) and len(event.rows) == 1 for _, event in heard)


# ---- what it keeps ------------------------------------------------------------------------------------------------


def test_a_second_request_with_the_same_prompt_copies_only_its_last_block() -> None:
    world = World(16)
    prompt = list(range(14))
    arrived(world, prompt, 4)
    world.finish()
    before = world.core.load().pulled_blocks
    arrived(world, prompt, 4)
    world.finish()
    assert before == 4 and world.core.load().pulled_blocks == 5


def test_blocks_filled_here_stay_cached_for_a_resumed_request() -> None:
    world = World(16)
    arrived(world, [1, 2, 3], 20)
    world.finish()
    log = world.requests[1].log
    arrived(world, [1, 2, 3, *log[:14]], 3)
    assert world.core.load().pulled_blocks == 1 + 1, "17 tokens, of which 16 were in 4 full blocks"
    world.finish()


def test_another_namespace_sees_nothing_of_it() -> None:
    world = World(16)
    prompt = list(range(14))
    arrived(world, prompt, 2)
    world.finish()
    start = start_of(world, prompt)
    before = world.core.load().pulled_blocks
    ticket = world.owner.offer(start.key._replace(placement=0, attempt=2), prompt, 0, start.params, world.now)
    key = start.key._replace(attempt=2)
    world.command(replace(start, key=key, ticket=ticket, cache_namespace=b"tenant"))
    world.transfer()
    assert world.core.load().pulled_blocks == before + 4


def test_new_blocks_are_zeroed_before_they_are_used() -> None:
    world = World(8)
    arrived(world, [1, 2, 3, 4], 8)
    zeroed = []
    while world.launch():
        assert world.batch is not None
        zeroed += world.batch.zero_blocks
        world.land()
    assert len(zeroed) == 2 and len(set(zeroed)) == 2


# ---- credit -------------------------------------------------------------------------------------------------------


def test_without_credit_a_slot_is_paused_and_goes_on_when_it_comes() -> None:
    world = World(8)
    request = world.submit([1, 2, 3], 8, until=3)
    world.transfer()
    while world.step():
        pass
    assert request.log == fake_tokens([1, 2, 3], 3)
    assert world.core.load().running == 1
    world.credit(request, 2)  # absolute: less than before changes nothing
    assert not world.step()
    world.credit(request, 5)
    while world.step():
        pass
    assert len(request.log) == 5
    world.credit(request, 100)
    world.finish()


def test_a_paused_slot_does_not_hold_up_the_others() -> None:
    world = World(16)
    world.submit([1, 2, 3], 8, until=1)
    arrived(world, [4, 5, 6], 8)
    while world.step():
        pass
    assert world.requests[2].over and not world.requests[1].over


def pass_time(world: World, seconds: float) -> None:
    """As the driver's ticker would."""
    for _ in range(round(seconds / 0.25)):
        world.now += 0.25
        world.apply(world.core.tick(world.now))


@pytest.mark.parametrize(("seats", "blocks"), [(2, 64), (8, 10)], ids=["every seat", "nearly every block"])
def test_readers_that_do_not_read_keep_no_healthy_request_waiting(seats: int, blocks: int) -> None:
    world = World(blocks, max_num_seqs=seats)
    slow = [world.submit([number] * 11, 20, until=4) for number in (1, 2)]
    world.transfer()
    while world.step():
        pass
    assert [len(request.log) for request in slow] == [4, 4] and world.core.load().running == 2
    healthy = world.submit([7] * 11, 12)
    world.transfer()
    assert not healthy.log, "a moment without credit costs nobody its place"
    pass_time(world, 1.0)
    assert [request.reasons for request in slow] == [[], [Reason.OUT_OF_BLOCKS]], "the newest leaves, and no more"
    world.transfer()
    while world.step():
        pass
    assert healthy.over
    for request in slow:
        world.credit(request, 1 << 30)
    world.finish()


def test_a_reader_that_does_not_read_keeps_its_place_where_its_leaving_would_help_nobody() -> None:
    world = World(12, max_num_seqs=8)
    slow = world.submit([1] * 7, 20, until=3)
    arrived(world, [2] * 7, 400, until=6)
    world.transfer()
    while world.step():
        pass
    busy, large = world.requests[2], world.submit([3] * 43, 3)
    for until in range(7, 15):  # it reads, and so it is never parked
        world.credit(busy, until)
        world.step()
        pass_time(world, 0.25)
    assert not large.log and not slow.reasons
    for request in world.requests.values():
        world.cancel(request)


def test_of_those_who_wait_only_one_with_credit_displaces_another() -> None:
    world = World(64, max_num_seqs=1)
    slow = world.submit([1] * 7, 20, until=3)
    world.transfer()
    while world.step():
        pass
    other = world.submit([2] * 7, 20, until=1)
    pass_time(world, 2.0)
    assert not slow.reasons and not other.log
    world.credit(other, 1 << 30)
    world.transfer()
    assert slow.reasons == [Reason.OUT_OF_BLOCKS] and other.log
    world.credit(slow, 1 << 30)
    world.finish()


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_its_numbers() -> None:
    world = World(4)
    start = start_of(world, [1, 2])
    long = list(range(16))
    ticket = world.owner.offer(RequestKey(1, 2), long, 0, start.params, world.now)
    world.command(replace(start, key=RequestKey(1, 2, 1), token_ids=long, ticket=ticket))
    refused = events(world, Refused)[-1]
    assert refused.reason is Reason.OUT_OF_BLOCKS
    assert refused.facts == {"needed_blocks": "5", "total_blocks": "4", "tokens": "16", "largest": "15"}
    assert world.core.idle


def test_a_full_queue_refuses_with_its_length_and_a_hint() -> None:
    world = World(2, max_waiting=2)
    for i in range(4):
        world.submit(range(i, i + 7), 2)
    (refused,) = events(world, Refused)
    assert refused.reason is Reason.QUEUE_FULL and refused.key.request == 4 and refused.retry_after > 0
    assert refused.facts["waiting"] == refused.facts["limit"] == "2"
    world.finish()


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": []},
        {"token_ids": [1, 2, 3]},
        {"emitted": 2},
        {"emitted": 7},
        {"token_ids": [1, 1000]},
        {"token_ids": list(range(9000))},
    ],
)
def test_a_start_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    world = World(8)
    start = start_of(world, [1, 2])
    world.command(replace(start, key=RequestKey(1, 9, 1), **change))
    assert events(world, Refused)[-1].reason is Reason.INVALID_FIELD
    assert world.core.idle


def test_a_start_without_seed_or_with_nothing_left_to_do_is_refused() -> None:
    world = World(8)
    start = start_of(world, [1, 2])
    for attempt, params in enumerate((replace(start.params, seed=None), replace(start.params, max_tokens=1)), 2):
        world.command(replace(start, key=RequestKey(1, attempt, 1), params=params))
        assert events(world, Refused)[-1].reason is Reason.INVALID_FIELD


# ---- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "arriving", "running", "in flight"])
def test_a_cancel_frees_everything_in_every_state(state: str) -> None:
    world = World(4)
    if state == "waiting":
        arrived(world, range(9), 4)
    request = world.submit(range(20, 29), 4)
    if state == "arriving":
        world.advance(request.ticket)
        for _ in range(3):
            world.deliver(1)
    elif state != "waiting":
        world.transfer()
    if state == "in flight":
        world.launch()
    world.cancel(request)
    world.audit()
    if state == "in flight":
        assert world.core.ledger()["draining"] == 3 and not world.core.idle
    world.finish()
    assert not [event for event in world.events if isinstance(event, Failed)]


def test_a_cancelled_slots_blocks_are_not_reused_while_a_step_writes() -> None:
    world = World(4)
    arrived(world, [1, 2, 3], 12)
    world.launch()
    world.cancel(world.requests[1])
    arrived(world, range(50, 64), 2)
    assert world.core.load().running == 0, "one block still belongs to the step"
    world.finish()
    assert tokens(world)[-1:] == fake_tokens(range(50, 64), 2)[-1:]


def test_destination_blocks_wait_for_the_end_of_the_copy() -> None:
    world = World(4)
    request = world.submit(range(9), 4)
    world.advance(request.ticket)
    while world.links[1].to_owner:
        world.deliver(1)
    while not world.core.ledger()["copying"]:
        world.deliver(1)
    world.links[1].hung = True
    world.cancel(request)
    assert world.core.ledger()["draining"] == 1 and world.core.destination(1, 0) is None
    arrived(world, range(20, 34), 2)
    assert world.core.load().running == 0
    world.links[1].hung = False
    world.finish()


def test_a_late_start_after_its_cancel_does_not_begin() -> None:
    world = World(8)
    start = start_of(world, [1, 2])
    key = RequestKey(1, 5, 1)
    world.command(Cancel(key))
    world.command(replace(start, key=key))
    assert world.core.idle and world.core.ignored["start_after_end"] == 1
    world.now += 1000.0
    world.apply(world.core.tick(world.now))
    assert key not in [each for _, each in world.core._tombstones._until]


def test_repeated_messages_change_nothing() -> None:
    world = World(8)
    request = world.submit([1, 2, 3], 4)
    ticket = world.owner.outbox._leases[request.ticket].ticket
    world.command(world.decode_start(request, ticket))
    assert world.core.ignored["duplicate_start"] == 1 and len(world.links) == 1
    world.command(Credit(RequestKey(9, 9, 9), 5))
    world.command(Heartbeat(1))
    world.apply(world.core.on_command(77, Heartbeat(1), world.now))
    world.apply(world.core.pull_event(99, BlocksSealed((BlockHandle(0, 0, 0, 0),)), world.now))
    world.apply(world.core.copied(99, {0: 0}, world.now))
    world.apply(world.core.copy_failed(99, 0, world.now))
    world.apply(world.core.pull_stream_closed(99, world.now))
    world.apply(world.core.detach(77, world.now))
    world.finish()


def test_a_deadline_ends_a_request_for_good() -> None:
    world = World(8)
    start = start_of(world, [1, 2, 3])
    ticket = world.owner.offer(RequestKey(1, 2), [1, 2, 3], 0, start.params, world.now)
    world.command(replace(start, key=RequestKey(1, 2, 1), ticket=ticket, deadline=5.0))
    world.now += 5.0
    world.apply(world.core.tick(world.now))
    failed = events(world, Failed)[-1]
    assert (failed.reason, failed.resumable) == (Reason.DEADLINE, False)


def test_a_session_that_ends_takes_its_own_jobs_and_no_others() -> None:
    world = World(16)
    world.apply(world.core.attach(2, RouterHello("other", 6, 1), world.now))
    arrived(world, [1, 2, 3], 8)
    world.apply(world.core.detach(2, world.now))
    assert world.core.load().running == 1
    world.apply(world.core.detach(1, world.now))
    world.requests[1].over = True
    world.audit()
    assert world.core.idle


def test_a_newer_session_of_the_same_router_ends_its_older_one() -> None:
    world = World(16)
    arrived(world, [1, 2, 3], 8)
    world.apply(world.core.attach(2, RouterHello("r", 5, 2), world.now))
    assert world.core.idle and list(world.core.sessions) == [2]
    assert world.core.attach(3, RouterHello("r", 5, 1), world.now) == []
    assert list(world.core.sessions) == [2] and world.core.ignored["old_session"] == 1
    world.apply(world.core.attach(4, RouterHello("r", 6, 1), world.now))
    assert list(world.core.sessions) == [2, 4], "another incarnation is another router"


# ---- faults -------------------------------------------------------------------------------------------------------


def test_a_corrupt_block_fails_the_attempt_and_the_next_one_succeeds() -> None:
    world = World(8)
    request = world.submit(range(9), 4)
    while not world.core.ledger()["copying"]:
        world.advance(request.ticket)
        world.deliver(1)
    world.apply(world.core.copied(1, {0: 12345}, world.now))
    (failed,) = events(world, Failed)
    assert (failed.reason, failed.resumable) == (Reason.COPY_FAILED, True)
    world.finish()
    assert request.attempt == 2


def test_a_lost_ticket_is_told_to_the_router() -> None:
    world = World(8)
    request = world.submit(range(9), 4)
    world.apply(world.owner.outbox.revoke(request.ticket, world.now))
    world.transfer()
    (failed,) = events(world, Failed)
    assert (failed.reason, failed.resumable) == (Reason.STALE_TICKET, True)


def test_an_arriving_slot_without_progress_fails_and_drains() -> None:
    world = World(8)
    request = world.submit(range(9), 4)
    while not world.core.ledger()["copying"]:
        world.advance(request.ticket)
        world.deliver(1)
    world.links[1].hung = True
    world.now += 9.9
    world.apply(world.core.tick(world.now))
    assert not events(world, Failed)
    world.now += 0.2
    world.apply(world.core.tick(world.now))
    assert events(world, Failed)[0].reason is Reason.COPY_FAILED
    assert world.core.ledger()["draining"] == 1
    world.links[1].hung = False
    world.finish()


def test_a_step_that_raises_fails_its_requests_and_no_others() -> None:
    world = World(16)
    arrived(world, [1, 2, 3], 8)
    world.launch()
    arrived(world, [4, 5, 6], 8)
    world.batch = None
    world.apply(world.core.step_failed({"error_id": "e1"}, world.now))
    (failed,) = events(world, Failed)
    assert (failed.key.request, failed.reason, failed.facts) == (1, Reason.INTERNAL, {"error_id": "e1"})
    world.audit()
    world.requests[1].over = True
    world.finish()
    assert world.requests[2].log == fake_tokens([4, 5, 6], 8)


def test_a_preempted_request_resumes_with_the_same_tokens() -> None:
    world = World(6, headroom=0)
    for i in range(3):
        world.submit([i, i, i], 18)
    world.finish()
    assert any(Reason.OUT_OF_BLOCKS in request.reasons for request in world.requests.values())
    assert not world.requests[1].reasons, "the oldest never gives way"


# ---- drain --------------------------------------------------------------------------------------------------------


def test_a_drain_refuses_what_is_new_and_hands_back_what_is_left() -> None:
    world = World(8)
    arrived(world, [1, 2, 3], 20)
    start = start_of(World(8), [1, 2])
    world.command(Drain(5.0))
    assert world.core.load().draining
    world.command(replace(start, key=RequestKey(1, 7, 1)))
    assert events(world, Refused)[-1].reason is Reason.DRAINING
    assert world.step(), "it runs on"
    world.now += 5.0
    world.launch()
    world.apply(world.core.tick(world.now))
    (failed,) = events(world, Failed)
    assert (failed.reason, failed.resumable) == (Reason.DRAINING, True)
    assert not world.core.idle
    world.land()
    world.requests[1].over = True
    world.audit()
    assert world.core.idle


def test_the_load_is_told_when_it_changes() -> None:
    world = World(8)
    assert not [a for a in world.core.tick(world.now) if isinstance(a, ToRouter)], "attach told it already"
    world.submit([1, 2, 3], 8)
    (action,) = world.core.tick(world.now)
    assert isinstance(action, ToRouter) and isinstance(action.event, WorkerLoad)
    assert (action.event.waiting, action.event.waiting_tokens, action.event.leased_blocks) == (1, 3, 1)


# ---- one process --------------------------------------------------------------------------------------------------


def test_a_ticket_of_this_process_is_adopted_without_a_copy() -> None:
    world = World(8)
    start = start_of(world, list(range(7)), 4)
    blocks = world.pool.take(2)
    ticket = replace(start.ticket, owner=NODE)
    actions = world.core.on_command(1, replace(start, key=RequestKey(1, 3, 1), ticket=ticket), world.now)
    (opened,) = actions
    assert isinstance(opened, OpenPull) and opened.message.transport == "local"
    pull, now = opened.pull, world.now
    handles = tuple(BlockHandle(block, 0, position, 0) for position, block in enumerate(blocks))
    assert world.core.pull_event(pull, BlocksSealed(handles), now) == []
    first = FirstToken(RequestKey(1, 3), Token(0, 5))
    (done,) = world.core.pull_event(pull, first, now)
    assert isinstance(done, ToOwner)
    (echo,) = world.core.adopted(pull, blocks, now)
    assert isinstance(echo, ToRouter) and isinstance(echo.event, FirstToken)
    world.audit()
    assert world.core.pull_stream_closed(pull, now) == []
    batch = world.core.next_batch(now)
    assert batch is not None and batch.rows[0].blocks[:2] == blocks and batch.rows[0].start == 7
    assert len(batch.rows[0].blocks) * SIZE >= 8


def test_an_adoption_that_comes_too_late_is_given_back() -> None:
    world = World(8)
    start = start_of(world, list(range(7)), 4)
    key = RequestKey(1, 3, 1)
    blocks, now = world.pool.take(2), world.now
    ticket = replace(start.ticket, owner=NODE)
    (opened,) = world.core.on_command(1, replace(start, key=key, ticket=ticket), now)
    assert isinstance(opened, OpenPull)
    handles = tuple(BlockHandle(block, 0, position, 0) for position, block in enumerate(blocks))
    world.core.pull_event(opened.pull, BlocksSealed(handles), now)
    world.core.pull_event(opened.pull, FirstToken(RequestKey(1, 3), Token(0, 5)), now)
    cancelled = world.core.on_command(1, Cancel(key), now)
    assert any(isinstance(action, CloseStream) for action in cancelled)
    assert world.core.adopted(opened.pull, blocks, now) == []
    world.audit()
    assert world.pool.available == 8
