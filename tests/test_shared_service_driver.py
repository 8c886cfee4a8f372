"""Both stages in one process: tokens are right, decode goes first, and what one stage breaks leaves the other alone."""

from __future__ import annotations

import asyncio
import random
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
from shared_service.pace import Pace
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
    """Takes two steps before the first is read, and computes each when it is read, in order, as a stream would. Rows
    of a step whose predecessor was not read yet come without their token. `other` is on the same stream."""

    depth = 2

    def __init__(self, other: Ahead | None = None) -> None:
        super().__init__()
        self.launched: list[str] = other.launched if other else []
        self._stream: deque[tuple[Ahead, Batch]] = other._stream if other else deque()
        self._sampled: dict[int, int] = {}
        if other:
            self.cache, self.steps = other.cache, other.steps

    def submit(self, batch: Batch) -> Batch:
        decodes = all(row.sample is not None and row.sample.index > 0 for row in batch.rows)
        self.launched.append("d" if decodes else "p")
        self._stream.append((self, batch))
        return batch

    def collect(self, launched: Batch) -> StepOutput:
        runner, batch = self._stream.popleft()
        assert runner is self and batch is launched, "steps are read in the order in which they were launched"
        for row in launched.rows:
            if not row.tokens:
                row.tokens = [self._sampled[row.slot]]
        output = self.step(launched)
        for row, token in zip(launched.rows, output.tokens, strict=True):
            if token is not None and token.index > 0:
                self._sampled[row.slot] = token.token_id
        return output

    def abandon(self) -> None:
        for one in [one for one in self._stream if one[0] is self]:
            self._stream.remove(one)


def driver_of(runner: Any, pace: Pace, device: DeviceThread, blocks: int = BLOCKS) -> SharedDriver:
    ahead = isinstance(runner, Ahead)
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
    prompts = Ahead(runner) if ahead else runner
    driver = SharedDriver(device, pace)
    driver.decodes(decoder, runner, runner if ahead else None, Observer("decode"))
    driver.prefills(prefiller, prompts, prompts if ahead else None, Observer("prefill"))
    return driver


@asynccontextmanager
async def running(runner: Any, pace: Pace | None = None, blocks: int = BLOCKS) -> AsyncIterator[Any]:
    device = DeviceThread("shared")
    driver = driver_of(runner, pace or Pace(LEAST, 256), device, blocks)
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
    pace = Pace(LEAST, 256)
    async with running(runner, pace) as (driver, feeder):
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


async def test_a_runner_that_is_ahead_gets_steps_and_chunks_by_turns() -> None:
    runner = Ahead()
    async with running(runner, Pace(LEAST, LEAST)) as (driver, feeder):
        steady = feeder.start(prompts(1, 8)[0], 60)
        while len(steady.times) < 3:
            await asyncio.sleep(0.001)
        runner.launched.clear()
        long = feeder.start(prompts(1, 500, 2)[0], 1)
        await feeder.all_over([long, steady])
        assert feeder.tokens[1] == fake_tokens(prompts(1, 8)[0], 60, VOCAB)
    order = "".join(runner.launched)
    assert "pp" not in order[: order.rindex("p")] and order.count("p") == 8, order


@pytest.mark.parametrize("runner_of", [Runner, Ahead])
@pytest.mark.parametrize("stage", ["p", "d"])
async def test_a_step_that_breaks_fails_its_requests_and_no_others(runner_of: Any, stage: str) -> None:
    runner = runner_of()
    async with running(runner) as (driver, feeder):
        steady = feeder.start(prompts(1, 8)[0], 40)
        while len(steady.times) < 3:
            await asyncio.sleep(0.001)
        (driver.prefill.ahead or runner if stage == "p" else runner).broken = stage
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
        pace = Pace(LEAST, 4096, share=1.5)
        pace.decoded(step)
        pace.prefilled(1000, 1000 * token)
        tokens = pace.tokens(decoding=True)
        assert tokens in pace.sizes
        assert step <= tokens * token <= 1.5 * step or tokens == LEAST


def test_what_a_chunk_costs_in_any_case_is_not_counted_for_each_token() -> None:
    """10 ms, and 20 us a token: of 21 ms, 11 are left for 550 tokens, whatever the last chunk's size was."""
    for size in (256, 384, 1024):
        pace = Pace(256, 2048, share=3.0, token_seconds=20e-6)
        pace.decoded(0.007)
        pace.prefilled(size, 0.010 + 20e-6 * size)
        assert pace.tokens(decoding=True) == 512  # 576 would be too many


def test_chunks_have_few_sizes() -> None:
    assert Pace(256, 1300).sizes == [256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1300]
    assert Pace(64, 100).sizes == [64, 80, 96, 100]
    assert Pace(256, 100).sizes == [100]


def test_a_chunk_is_small_before_anything_is_known_and_whole_while_nobody_decodes() -> None:
    pace = Pace(128, 2048)
    assert pace.tokens(decoding=True) == 128 and pace.tokens(decoding=False) == 2048
    pace.decoded(1e-6)
    pace.prefilled(128, 1.0)
    assert pace.tokens(decoding=True) == 128
    pace.decoded(1e6)
    assert pace.tokens(decoding=True) == 2048
    assert Pace(256, 100).tokens(decoding=True) == 100
