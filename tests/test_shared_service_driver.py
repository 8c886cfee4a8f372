"""Both stages in one process: tokens are right, decode goes first, and what one stage breaks leaves the other alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.interference import Feeder, Request
from decode_service.decoder import Decoder
from engine.batch import Batch, StepOutput
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.device_thread import DeviceThread
from engine.fake_runner import FakeRunner, fake_tokens
from engine.messages import Node
from prefill_service.prefiller import Prefiller
from shared_service.driver import SharedDriver
from shared_service.pace import Chunks, Pace
from wire.observer import Observer

BLOCKS, SIZE, VOCAB = 128, 16, 1000
LEAST = 64  # tokens of a chunk


class Runner(FakeRunner):
    """Notes each step: "p" and its tokens, or "d" and its rows."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(SIZE, BLOCKS, VOCAB, step_seconds=seconds)
        self.steps: list[tuple[str, int]] = []
        self.broken = ""

    def step(self, batch: Batch) -> StepOutput:
        decodes = all(row.sample is not None and row.sample.index > 0 for row in batch.rows)
        self.steps.append(("d", len(batch.rows)) if decodes else ("p", batch.num_tokens))
        if self.broken == self.steps[-1][0]:
            self.broken = ""
            raise RuntimeError("a step broke")
        return super().step(batch)


class Ahead(Runner):
    """A stream of a card: takes two steps before the first is read, and computes each when it is read, in order. Rows
    of a step whose predecessor was not read yet come without their token. `seconds` each step takes."""

    depth = 2

    def __init__(self, seconds: float = 0.0, beside: Ahead | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.launched_at: list[float] = []
        self.card_times: list[tuple[int, int]] = []
        self._stream: deque[tuple[Batch, float]] = deque()  # and when it is done
        self._sampled: dict[int, int] = {}
        if beside:
            self.cache = beside.cache

    def submit(self, batch: Batch) -> Batch:
        self.launched_at.append(time.monotonic())
        began = max([self.launched_at[-1], *(done for _, done in self._stream)])
        self._stream.append((batch, began + self.seconds))
        return batch

    def collect(self, launched: Batch) -> StepOutput:
        batch, done = self._stream.popleft()
        assert batch is launched, "steps are read in the order in which they were launched"
        time.sleep(max(0.0, done - time.monotonic()))
        self.card_times.append((int(1e9 * (done - self.seconds)), int(1e9 * done)))
        for row in launched.rows:
            if not row.tokens:
                row.tokens = [self._sampled[row.slot]]
        output = self.step(launched)
        output.seconds = time.monotonic() - self.launched_at[-1 - len(self._stream)]
        for row, token in zip(launched.rows, output.tokens, strict=True):
            if token is not None and token.index > 0:
                self._sampled[row.slot] = token.token_id
        return output

    def abandon(self) -> None:
        self._stream.clear()


def driver_of(runner: Any, chunks: Chunks, pace: Pace, devices: Sequence[DeviceThread], blocks: int) -> SharedDriver:
    ahead = runner if isinstance(runner, Ahead) else None
    config = EngineConfig(
        block_size=SIZE, num_blocks=blocks, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512,
        dtype="float32",
    )  # fmt: skip
    pool, node, depth = BlockPool(blocks), Node("shared", 1, "in-process:0"), 2 if ahead else 1
    common: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_ids": (), "depth": depth}
    decoder = Decoder(node, runner.layout, config, pool, transport="local", **common)
    prefiller = Prefiller(
        node, runner.layout, config, pool, rng=random.Random(1), digests=False, promises=decoder, **common
    )
    driver = SharedDriver(chunks, pace)
    if ahead is None:
        driver.decodes(decoder, runner, devices[0], None, Observer("decode"))
        driver.prefills(prefiller, runner, devices[0], None, Observer("prefill"))
    else:
        runner.prompts = Ahead(beside=runner)
        driver.decodes(decoder, runner, devices[0], runner, Observer("decode"), runner.card_times)
        driver.prefills(prefiller, runner.prompts, devices[1], runner.prompts, Observer("prefill"))
    return driver


@asynccontextmanager
async def running(
    runner: Any, chunks: Chunks | None = None, pace: Pace | None = None, blocks: int = BLOCKS
) -> AsyncIterator[Any]:
    devices = DeviceThread("shared"), DeviceThread("prompts")
    driver = driver_of(runner, chunks or Chunks(LEAST, 256), pace or Pace(0.0), devices, blocks)
    task = asyncio.create_task(driver.run())
    feeder = Tokens(driver)
    try:
        yield driver, feeder
        async with asyncio.timeout(30.0):
            while not (driver.prefiller.idle and driver.decoder.idle):
                await asyncio.sleep(0.002)
        driver.prefiller.audit(driver.decoder.holders())
        driver.decoder.audit(driver.prefiller.holders())
        assert driver.prefiller.pool.ledger()["referenced"] == 0
    finally:
        feeder.stop()
        task.cancel()
        await asyncio.wait([task])
        for device in devices:
            device.close()


class Tokens(Feeder):
    """Keeps the tokens and the failures, too."""

    def __init__(self, driver: SharedDriver) -> None:
        super().__init__(driver)
        self.tokens: dict[int, list[int]] = {}
        self.failed: dict[int, str] = {}

    def _on_event(self, event: Any) -> None:
        name = type(event).__name__
        if name in ("Failed", "Refused"):
            self.failed[event.key.request] = event.reason.name
            self._requests[event.key.request].over.set()
            return
        rows = event.rows if name == "StepBatch" else [(event.key, event.token)] if name == "FirstToken" else []
        for key, token in rows:
            mine = self.tokens.setdefault(key.request, [])
            if token.index == len(mine):
                mine.append(token.token_id)
        super()._on_event(event)

    async def all_over(self, requests: Sequence[Request]) -> None:
        async with asyncio.timeout(60.0):
            for request in requests:
                await request.over.wait()


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("runner_of", [Runner, Ahead])
async def test_tokens_are_those_of_every_prompt_whatever_the_company(runner_of: Any) -> None:
    runner = runner_of()
    async with running(runner) as (driver, feeder):
        given = prompts(20, 30) + prompts(3, 200, 1)
        requests = [feeder.start(prompt, 1 + number % 12) for number, prompt in enumerate(given)]
        await feeder.all_over(requests)
        assert not feeder.failed
        for number, prompt in enumerate(given):
            assert feeder.tokens[number + 1] == fake_tokens(prompt, 1 + number % 12, VOCAB)


async def test_between_two_decode_steps_runs_at_most_one_chunk_of_the_paces_size() -> None:
    runner = Runner(seconds=0.001)
    async with running(runner) as (driver, feeder):
        steady = feeder.start(prompts(1, 8)[0], 60)
        while len(steady.times) < 3:
            await asyncio.sleep(0.001)
        runner.steps.clear()
        long = [feeder.start(prompt, 1) for prompt in prompts(3, 400, 2)]
        await feeder.all_over([*long, steady])
    busy = runner.steps[: next(i for i in range(len(runner.steps) - 1, -1, -1) if runner.steps[i][0] == "p")]
    kinds = "".join(kind for kind, _ in busy)
    assert "pp" not in kinds and kinds.count("p") >= 4, kinds
    assert max(size for kind, size in busy if kind == "p") <= 256


async def test_prompts_alone_are_computed_in_whole_budgets() -> None:
    runner = Runner()
    async with running(runner) as (driver, feeder):
        await feeder.all_over([feeder.start(prompts(1, 500)[0], 1)])
    assert [size for kind, size in runner.steps if kind == "p"] == [256, 244]


async def test_decode_leaves_a_prompt_its_time_and_goes_on_at_once_when_it_is_computed() -> None:
    step, chunk = 0.01, 0.25
    runner = Ahead(step)
    async with running(runner, Chunks(256, 256), Pace(6.0)) as (driver, feeder):
        runner.prompts.seconds = chunk
        steady = feeder.start(prompts(1, 8)[0], 120)
        while len(steady.times) < 20:
            await asyncio.sleep(0.001)
        long = feeder.start(prompts(1, 400, 2)[0], 1)
        await feeder.all_over([long])
        began, ended = runner.prompts.launched_at[1], time.monotonic()
        driver.pace.interval = 1000.0
        again = feeder.start(prompts(1, 100, 3)[0], 1)
        await feeder.all_over([again])
        read = time.monotonic()
        await feeder.all_over([steady])
        assert feeder.tokens[1] == fake_tokens(prompts(1, 8)[0], 120, VOCAB)
    launched = runner.launched_at
    beside = [at for at in launched if began + 2 * step < at < ended - step]
    assert len(beside) >= 4, "decode goes on beside a prompt"
    assert min(after - before for before, after in itertools.pairwise(beside)) >= 0.95 * 6.0 * step
    assert min(at for at in launched if at > read - step) < read + 0.1, "a hold ends with what it is for"


@pytest.mark.parametrize("runner_of", [Runner, Ahead])
@pytest.mark.parametrize("stage", ["p", "d"])
async def test_a_step_that_breaks_fails_its_requests_and_no_others(runner_of: Any, stage: str) -> None:
    runner = runner_of()
    async with running(runner) as (driver, feeder):
        steady = feeder.start(prompts(1, 8)[0], 40)
        while len(steady.times) < 3:
            await asyncio.sleep(0.001)
        (getattr(runner, "prompts", runner) if stage == "p" else runner).broken = stage
        other = feeder.start(prompts(1, 100, 2)[0], 1)
        await feeder.all_over([other, steady])
        assert feeder.failed == {2 if stage == "p" else 1: "INTERNAL"}
        after = feeder.start(prompts(1, 20, 3)[0], 5)
        await feeder.all_over([after])
        assert feeder.tokens[3] == fake_tokens(prompts(1, 20, 3)[0], 5, VOCAB)


async def test_a_prompt_that_waits_for_blocks_is_admitted_as_soon_as_a_step_gives_some_back() -> None:
    runner = Runner()
    async with running(runner, blocks=8) as (driver, feeder):
        requests = [feeder.start(prompt, 4) for prompt in prompts(12, 40)]
        await feeder.all_over(requests)
        assert not feeder.failed
        for number, prompt in enumerate(prompts(12, 40)):
            assert feeder.tokens[number + 1] == fake_tokens(prompt, 4, VOCAB)


# ---- pace ---------------------------------------------------------------------------------------------------------


def test_a_chunk_takes_its_share_of_a_step_however_fast_the_device_is() -> None:
    for step, token in ((0.007, 20e-6), (0.05, 1e-3), (0.0005, 5e-6)):
        chunks = Chunks(LEAST, 4096, share=1.5)
        chunks.decoded(step)
        chunks.prefilled(1000, 1000 * token)
        tokens = chunks.tokens(decoding=True)
        assert tokens % LEAST == 0
        assert step <= tokens * token <= 1.5 * step or tokens == LEAST


def test_a_chunk_is_small_before_anything_is_known_and_whole_while_nobody_decodes() -> None:
    chunks = Chunks(128, 2000)
    assert chunks.tokens(decoding=True) == 128 and chunks.tokens(decoding=False) == 2000
    chunks.decoded(1e-6)
    chunks.prefilled(128, 1.0)
    assert chunks.tokens(decoding=True) == 128
    chunks.decoded(1e6)
    assert chunks.tokens(decoding=True) == 2000
    assert Chunks(256, 100).tokens(decoding=True) == 100


def test_a_step_beside_a_prompt_waits_until_the_interval_since_the_last_has_passed() -> None:
    pace = Pace(interval=2.5)
    pace.launched(10.0)
    assert pace.hold(10.0, computing=True) == 0, "nothing is known of a step"
    pace.decoded(0.008, alone=True)
    assert pace.hold(10.005, computing=True) == pytest.approx(0.015)
    assert pace.hold(10.005, computing=False) == 0
    assert pace.hold(10.5, computing=True) == 0


def test_only_steps_alone_say_how_long_a_step_takes_but_a_faster_one_says_that_they_take_no_longer() -> None:
    pace = Pace(interval=2.0)
    pace.launched(0.0)
    pace.decoded(0.016, alone=False)
    assert pace.hold(0.0, computing=True) == 0
    pace.decoded(0.008, alone=True)
    pace.decoded(0.015, alone=False)
    assert pace.hold(0.0, computing=True) == pytest.approx(0.016)
    pace.decoded(0.005, alone=False)
    assert pace.hold(0.0, computing=True) == pytest.approx(0.010)


def test_steps_that_take_longer_than_the_interval_beside_a_prompt_follow_each_other_without_a_break() -> None:
    pace = Pace(interval=2.0)
    pace.launched(0.0)
    pace.decoded(0.008, alone=True)
    pace.decoded(0.017, alone=False)
    assert pace.hold(0.0, computing=True) == 0
    pace.decoded(0.015, alone=False)
    assert pace.hold(0.0, computing=True) == pytest.approx(0.016)
