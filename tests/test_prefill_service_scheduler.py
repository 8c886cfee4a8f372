"""How prompts are cut into steps: plain lists in, plain lists out."""

from __future__ import annotations

from dataclasses import replace

from engine.batch import Batch, StepOutput
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.messages import PrefillStart, RequestKey
from engine.prefix_cache import chain, root_digest
from engine.types import SamplingParams, Token, TokenLogprob
from prefill_service.scheduler import PrefillJob, PrefillScheduler, Progress

SIZE = 16
PARAMS = SamplingParams(temperature=0, seed=1, max_tokens=8)


def make(blocks: int = 16, budget: int = 32, seqs: int = 8, digests: bool = True) -> PrefillScheduler:
    config = EngineConfig(block_size=SIZE, num_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=seqs)
    return PrefillScheduler(BlockPool(blocks), config, {2}, digests=digests)


def job(request: int, length: int, age: float = 0.0, **params: int) -> PrefillJob:
    tokens = tuple(range(request, request + length))
    start = PrefillStart(RequestKey(request, 1), tokens, 0, replace(PARAMS, **params), 60.0, age)  # type: ignore[arg-type]
    hashes = chain(root_digest(b"", b"m", "", "float32", SIZE), tokens, SIZE)
    return PrefillJob(1, start, hashes, 100.0, 100.0 - age, 160.0)


def admit_all(scheduler: PrefillScheduler) -> list[int]:
    admitted = []
    while filling := scheduler.admit(len(scheduler.filling) + 1, 100.0):
        admitted.append(filling.job.start.key.request)
    return admitted


def answer(scheduler: PrefillScheduler, batch: Batch) -> list[Progress]:
    tokens = [Token(row.sample.index, 5) if row.sample else None for row in batch.rows]
    logprobs = [[TokenLogprob(target, -1.0, 1) for target in row.targets] for row in batch.rows]
    return scheduler.finish(StepOutput(tokens, logprobs, [ask.position + 100 for ask in batch.digests], 0.01))


def step(scheduler: PrefillScheduler) -> tuple[Batch, list[Progress]]:
    batch = scheduler.next_batch()
    assert batch is not None
    return batch, answer(scheduler, batch)


def test_a_long_prompt_is_cut_at_the_budget_and_sampled_at_its_end() -> None:
    scheduler = make(budget=24)
    scheduler.enqueue(job(1, 40))
    admit_all(scheduler)
    first, progress = step(scheduler)
    assert [(row.start, len(row.tokens), row.sample) for row in first.rows] == [(0, 24, None)]
    assert [handle.position for handle in progress[0].sealed] == [0]
    second, progress = step(scheduler)
    (row,) = second.rows
    assert (row.start, list(row.tokens)) == (24, list(range(25, 41))) and row.sample is not None
    assert [(handle.position, handle.digest) for handle in progress[0].sealed] == [(1, 101), (2, 102)]
    assert scheduler.next_batch() is None


def test_blocks_are_zeroed_once_in_the_first_step_of_their_prompt() -> None:
    scheduler = make(budget=16)
    scheduler.enqueue(job(1, 40))
    admit_all(scheduler)
    first, _ = step(scheduler)
    second, _ = step(scheduler)
    assert sorted(first.zero_blocks) == sorted(scheduler.filling[0].table.blocks) and second.zero_blocks == []


def test_the_oldest_prompt_has_the_budget_first_and_the_rest_goes_to_the_next() -> None:
    scheduler = make(budget=32)
    for each in (job(1, 40, age=1.0), job(2, 20, age=9.0), job(3, 20, age=5.0)):
        scheduler.enqueue(each)
    assert admit_all(scheduler) == [2, 3, 1]
    batch, _ = step(scheduler)
    assert [(row.tokens[0], len(row.tokens)) for row in batch.rows] == [(2, 20), (3, 12)]


def test_a_younger_prompt_waits_behind_an_older_one_that_does_not_fit_yet() -> None:
    scheduler = make(blocks=4)
    scheduler.enqueue(job(1, 40))
    admit_all(scheduler)
    scheduler.enqueue(job(2, 40, age=5.0))
    scheduler.enqueue(job(3, 10))
    assert admit_all(scheduler) == [] and scheduler.pool.available == 1


def test_no_more_prompts_than_slots_are_filled_at_a_time() -> None:
    scheduler = make(seqs=2)
    for request in range(3):
        scheduler.enqueue(job(request, 10))
    assert len(admit_all(scheduler)) == 2
    step(scheduler)
    assert admit_all(scheduler) == [2]


def test_a_full_cached_block_is_shared_and_the_last_position_is_computed_again() -> None:
    scheduler = make()
    scheduler.enqueue(job(1, 32))
    admit_all(scheduler)
    _, progress = step(scheduler)
    scheduler.enqueue(job(1, 32))
    filling = scheduler.admit(9, 100.0)
    assert filling is not None and (filling.reused, filling.done) == (1, 16)
    assert filling.table.blocks[0] == progress[0].filling.table.blocks[0]
    assert [handle.digest for handle in scheduler.reused_handles(filling)] == [100]
    assert scheduler.pool.refs(filling.table.blocks[0]) == 2


def test_a_prompt_that_does_not_fit_leaves_no_reference_on_cached_blocks() -> None:
    scheduler = make(blocks=4)
    scheduler.enqueue(job(1, 32))
    admit_all(scheduler)
    step(scheduler)
    scheduler.enqueue(job(1, 70))
    assert scheduler.admit(9, 100.0) is None
    assert max(scheduler.pool.refs(block) for block in range(4)) == 1


def test_prompt_logprobs_name_the_token_after_each_position() -> None:
    scheduler = make(budget=16)
    scheduler.enqueue(job(1, 20, prompt_logprobs=0))
    admit_all(scheduler)
    first, _ = step(scheduler)
    second, progress = step(scheduler)
    assert list(first.rows[0].targets) == list(range(2, 18)) and list(second.rows[0].targets) == list(range(18, 21))
    assert [each.token_id for each in progress[0].filling.prompt_logprobs] == list(range(2, 21))


def test_without_digests_none_are_asked_for() -> None:
    scheduler = make(digests=False)
    scheduler.enqueue(job(1, 20))
    admit_all(scheduler)
    batch, progress = step(scheduler)
    assert batch.digests == [] and [handle.digest for handle in progress[0].sealed] == [0, 0]


def test_a_failed_step_leaves_no_name_in_the_cache() -> None:
    scheduler = make()
    scheduler.enqueue(job(1, 32))
    admit_all(scheduler)
    assert scheduler.next_batch() is not None and scheduler.next_batch() is None
    (filling,) = scheduler.abandon()
    assert scheduler.filling == [] and scheduler.pool.find(filling.job.hashes[0]) is None
