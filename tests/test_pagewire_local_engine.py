"""The unsplit engine: both stages in one loop give every request its tokens, whatever the pool and the company."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_service.config import ROLE
from engine.batch import Batch, StepOutput
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.types import FinishReason, SamplingParams, Token
from kvtransfer.startup import assemble
from pagewire.local_engine import LocalEngine
from wire.options import parse

SIZE = 16


def engine(blocks: int = 32, eos: tuple[int, ...] = (), headroom: int = 2, **config: Any) -> LocalEngine:
    runner = FakeRunner(SIZE, blocks, eos_token_ids=eos)
    return LocalEngine(runner, EngineConfig(block_size=SIZE, num_blocks=blocks, **config), headroom=headroom)


def run(unsplit: LocalEngine) -> dict[int, list[tuple[Token, FinishReason | None]]]:
    produced: dict[int, list[tuple[Token, FinishReason | None]]] = {}
    while unsplit.has_work:
        for request, token, reason in unsplit.step():
            produced.setdefault(request, []).append((token, reason))
        unsplit.audit()
    return produced


def ids(produced: list[tuple[Token, FinishReason | None]]) -> list[int]:
    assert [token.index for token, _ in produced] == list(range(len(produced)))
    return [token.token_id for token, _ in produced]


def greedy(max_tokens: int | None = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def test_a_request_gets_its_tokens_in_order_and_one_reason() -> None:
    unsplit = engine()
    request = unsplit.add_request([5, 6, 7], greedy(8))
    produced = run(unsplit)[request]
    assert ids(produced) == fake_tokens([5, 6, 7], 8)
    assert [reason for _, reason in produced] == [None] * 7 + [FinishReason.LENGTH]
    assert not unsplit.has_work and unsplit.step() == []


def test_many_requests_join_and_leave_at_any_step() -> None:
    unsplit = engine(64, max_num_seqs=4, max_num_batched_tokens=24)
    prompts = {unsplit.add_request(range(i, i + 3 + 7 * i), greedy(5 + i)): i for i in range(9)}
    produced = run(unsplit)
    for request, i in prompts.items():
        assert ids(produced[request]) == fake_tokens(range(i, i + 3 + 7 * i), 5 + i)


def test_a_single_token_needs_no_decode_step() -> None:
    unsplit = engine()
    request = unsplit.add_request([1, 2], greedy(1))
    assert [(index, reason) for index, _, reason in unsplit.step()] == [(request, FinishReason.LENGTH)]
    unsplit.audit()


@pytest.mark.parametrize("tokens", (5, 32, 37))
def test_a_prompt_that_goes_on_from_an_answer_finds_the_blocks_that_decode_filled(tokens: int) -> None:
    unsplit, prompt = engine(), list(range(tokens))
    for count in (8, 40):  # the second time its blocks are shared, but for a full last one, which then has no name
        request = unsplit.add_request(prompt, greedy(count))
        answer = ids(run(unsplit)[request])
    again = unsplit.add_request(prompt + answer, greedy(1))
    run(unsplit)
    assert unsplit.begun[again].cached_tokens == (tokens + 39) // SIZE * SIZE


def test_an_end_token_ends_a_request_early_and_ignore_eos_does_not() -> None:
    expected = fake_tokens([3, 1, 4], 12)
    unsplit = engine(eos=(expected[4],))
    stopped = unsplit.add_request([3, 1, 4], greedy(12))
    ignoring = unsplit.add_request([3, 1, 4], greedy(12, ignore_eos=True))
    produced = run(unsplit)
    assert ids(produced[stopped]) == expected[:5] and produced[stopped][-1][1] is FinishReason.STOP
    assert ids(produced[ignoring]) == expected


def test_an_end_token_may_be_the_first_one() -> None:
    expected = fake_tokens([3, 1, 4], 1)
    unsplit = engine(eos=(expected[0],))
    request = unsplit.add_request([3, 1, 4], greedy(12))
    assert run(unsplit)[request] == [(Token(0, expected[0]), FinishReason.STOP)]


def test_without_max_tokens_a_request_fills_what_there_is() -> None:
    unsplit = engine(2)
    request = unsplit.add_request([9] * 10, greedy(None))
    assert ids(run(unsplit)[request]) == fake_tokens([9] * 10, 2 * SIZE + 1 - 10)


def test_a_shared_prompt_is_computed_once() -> None:
    unsplit = engine(64)
    prompt = list(range(100))
    run_tokens: list[int] = []
    step = unsplit._runner.step

    def counting(batch: Any) -> Any:
        run_tokens.append(batch.num_tokens)
        return step(batch)

    unsplit._runner.step = counting
    first = unsplit.add_request(prompt, greedy(4))
    assert ids(run(unsplit)[first]) == fake_tokens(prompt, 4)
    computed = sum(run_tokens)
    second = unsplit.add_request(prompt, greedy(4))
    assert ids(run(unsplit)[second]) == fake_tokens(prompt, 4)
    assert sum(run_tokens) - computed == 100 - 6 * SIZE + 3


def test_prompt_logprobs_come_with_the_first_token() -> None:
    unsplit = engine()
    request = unsplit.add_request([5, 6, 7], greedy(2, prompt_logprobs=1))
    run(unsplit)
    logprobs = unsplit.prompt_logprobs.pop(request)
    assert [each.token_id for each in logprobs] == [5, 6, 7] and logprobs[0].logprob is None


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    for steps in range(6):
        unsplit = engine(max_num_batched_tokens=16)
        gone = unsplit.add_request(list(range(40)), greedy(20))
        stays = unsplit.add_request([1, 2, 3], greedy(20))
        heard = {gone: 0, stays: 0}
        for _ in range(steps):
            for request, _, _ in unsplit.step():
                heard[request] += 1
        unsplit.cancel(gone)
        unsplit.cancel(gone)
        unsplit.audit()
        produced = run(unsplit)
        assert gone not in produced
        assert heard[stays] + len(produced[stays]) == 20


@pytest.mark.parametrize(
    ("prompt", "params", "numbers"),
    [
        ([], greedy(1), "empty"),
        ([1] * 64, greedy(2), "64 prompt tokens and max_tokens 2 are more than 65"),
        ([1] * 65, greedy(None), "65 tokens and at most 64 fit"),
    ],
)
def test_what_can_never_fit_is_refused(prompt: list[int], params: SamplingParams, numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        engine(4).add_request(prompt, params)


def test_sampling_with_a_seed_repeats_itself_over_preemptions() -> None:
    sampled = SamplingParams(temperature=1.0, seed=11, max_tokens=40)
    expected = fake_tokens([8, 9], 40, params=sampled)
    alone = engine()
    request = alone.add_request([8, 9], sampled)
    assert ids(run(alone)[request]) == expected
    crowded = engine(7, headroom=0)
    requests = [crowded.add_request([8, 9], sampled) for _ in range(5)]
    starts = _count_starts(crowded)
    produced = run(crowded)
    assert all(ids(produced[request]) == expected for request in requests)
    assert starts, "no request was preempted"


def _count_starts(unsplit: LocalEngine) -> list[int]:
    starts: list[int] = []
    original = unsplit._start

    def start(request: Any) -> None:
        starts.append(request.id)
        original(request)

    unsplit._start = start  # type: ignore[method-assign]
    return starts


@pytest.mark.parametrize("part", range(4))
def test_small_pools_neither_deadlock_nor_starve_nor_leak(part: int) -> None:
    for seed in range(part, 60, 4):
        rng = random.Random(seed)
        blocks = rng.randint(6, 20)
        crowd = rng.random() < 0.5  # short prompts, many at once, nothing kept free
        unsplit = engine(
            blocks,
            headroom=0 if crowd else rng.choice([0, 2]),
            max_num_seqs=8 if crowd else rng.choice([1, 2, 8]),
            max_num_batched_tokens=rng.choice([16, 64, 64 if crowd else 2048]),
        )
        expected: dict[int, list[int]] = {}
        produced: dict[int, list[int]] = {}
        pending = 10 if crowd else rng.randint(3, 10)
        patience = 1.0 if crowd else 0.2
        longest = blocks * SIZE // (3 if crowd else 1)
        for _ in range(20_000):
            while pending and rng.random() < patience:
                pending -= 1
                length = rng.randint(1, longest)
                count = min(rng.choice([4, 40, 400]), blocks * SIZE + 1 - length)
                prompt = [rng.randrange(1000) for _ in range(length)]
                request = unsplit.add_request(prompt, greedy(count))
                expected[request], produced[request] = fake_tokens(prompt, count), []
            if expected and rng.random() < 0.01:
                gone = rng.choice(list(expected))
                unsplit.cancel(gone)
                expected[gone] = produced[gone]  # what it had is all that it gets
            for request, token, _ in unsplit.step():
                produced[request].append(token.token_id)
            unsplit.audit()
            if not pending and not unsplit.has_work:
                break
        assert produced == expected, f"seed {seed}"


def test_a_real_model_gives_the_same_tokens_alone_and_in_a_crowded_pool(model_cache: Path) -> None:
    argv = f"--model random:tiny --cache-dir {model_cache} --row-tile 16 --kv-memory 260KiB --threads 1".split()
    parts = assemble(parse(ROLE, argv, {}), lambda phase: None)
    assert parts.config.num_blocks == 8
    sampled = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3, max_tokens=24, ignore_eos=True)
    prompts = [[(7 * i * j + i) % parts.runner.vocab_size for j in range(9 + 11 * i)] for i in range(4)]
    alone = []
    for prompt in prompts:
        unsplit = LocalEngine(parts.runner, parts.config)
        request = unsplit.add_request(prompt, sampled)
        alone.append(ids(run(unsplit)[request]))
    crowded = LocalEngine(parts.runner, parts.config, headroom=0)
    requests = [crowded.add_request(prompt, sampled) for prompt in prompts]
    starts = _count_starts(crowded)
    produced = run(crowded)
    assert [ids(produced[request]) for request in requests] == alone
    assert starts, "no request was preempted"


class AheadRunner(FakeRunner):
    """Takes two steps before the first is read, and keeps the newest tokens to itself, as a card does."""

    depth = 2

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.newest: dict[int, int | None] = {}  # by slot; None: ended
        self.launched = self.most_launched = 0

    def submit(self, batch: Batch) -> StepOutput:
        rows = []
        for row in batch.rows:
            token = self.newest[row.slot] if not row.tokens else -1
            if token is not None:
                rows.append(replace(row, tokens=[token]) if not row.tokens else row)
        output = self.step(replace(batch, rows=rows))
        found = {row.slot: token for row, token in zip(rows, output.tokens, strict=True)}
        for row in rows:
            if row.sample is not None and (token := found[row.slot]) is not None:
                eos = frozenset() if row.sample.params.ignore_eos else self.eos_token_ids
                ended = token.token_id in eos or token.index + 1 == row.sample.params.max_tokens
                self.newest[row.slot] = None if ended else token.token_id
        self.launched += 1
        self.most_launched = max(self.most_launched, self.launched)
        tokens = [found.get(row.slot) for row in batch.rows]
        return replace(output, tokens=tokens, prompt_logprobs=[[] for _ in batch.rows])

    def collect(self, output: StepOutput) -> StepOutput:
        self.launched -= 1
        return output


@pytest.mark.parametrize("budget", [2048, 24])
@pytest.mark.parametrize("blocks", [64, 14, 9])
def test_steps_that_start_before_the_last_is_read_change_no_token(blocks: int, budget: int) -> None:
    runner = AheadRunner(SIZE, blocks, eos_token_ids=(3, 7, 11, 400, 800))
    unsplit = LocalEngine(runner, EngineConfig(SIZE, blocks, 4, budget), headroom=0)
    rng = random.Random(blocks)
    prompts = [[rng.randrange(1000) for _ in range(rng.choice((1, 15, 16, 33, 50)))] for _ in range(12)]
    counts = [rng.choice((1, 2, 17, 40, 60)) for _ in prompts]
    numbers = [unsplit.add_request(*both) for both in zip(prompts, map(greedy, counts), strict=True)]
    produced = run(unsplit)
    for number, prompt, count in zip(numbers, prompts, counts, strict=True):
        expected = fake_tokens(prompt, count, eos=frozenset(runner.eos_token_ids))
        end = next((i for i, token in enumerate(expected) if token in runner.eos_token_ids), count - 1)
        assert ids(produced[number]) == expected[: end + 1]
    assert runner.most_launched == 2 and runner.launched == 0


def test_a_cancelled_request_leaves_no_block_behind_while_its_steps_run() -> None:
    runner = AheadRunner(SIZE, 32)
    unsplit = LocalEngine(runner, EngineConfig(block_size=SIZE, num_blocks=32))
    doomed, other = unsplit.add_request([5, 6, 7], greedy(60)), unsplit.add_request([8, 9], greedy(20))
    early = [token.token_id for _ in range(8) for number, token, _ in unsplit.step() if number == other]
    unsplit.cancel(doomed)
    late = [token.token_id for token, _ in run(unsplit)[other]]
    assert early + late == fake_tokens([8, 9], 20)


def test_a_cancelled_request_that_was_alone_leaves_work_until_its_steps_are_read() -> None:
    runner = AheadRunner(SIZE, 32)
    unsplit = LocalEngine(runner, EngineConfig(block_size=SIZE, num_blocks=32))
    request = unsplit.add_request([5, 6, 7], greedy(60))
    for _ in range(3):
        unsplit.step()
    unsplit.cancel(request)
    assert runner.launched and unsplit.has_work
    assert unsplit.step() == [] and not runner.launched and not unsplit.has_work
    unsplit.audit()
