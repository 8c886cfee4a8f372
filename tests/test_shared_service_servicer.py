"""Both stages on an emulated card: one runner for rows, one for prompts, over the same weights and the same pool."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from emulated_gpu import EmulatedGpu

from benchmarks.interference import Feeder
from engine.backend.cpu import CPUBackend
from engine.config import EngineConfig, ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_runner import CudaRunner
from engine.kv_cache import KVCache, kv_layout
from engine.loader.random_shapes import SHAPES
from engine.loader.random_weights import random_tensors
from engine.models.llama import Llama
from engine.runner import ModelRunner
from engine.types import SamplingParams
from kvtransfer.startup import Engine, Say
from pagewire.local_engine import LocalEngine
from shared_service.config import ROLE
from shared_service.servicer import SharedServicer, warm_up
from wire.options import WorkerOptions, parse

BLOCKS, SPARE = 40, 4
CONFIG = EngineConfig(
    block_size=16, num_blocks=BLOCKS, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256, dtype="float32"
)


def weights() -> Llama:
    config = ModelConfig.from_dict(SHAPES["tiny"])
    return Llama(config, random_tensors(config, 0, torch.float32, lambda *_: None))


def emulated(options: WorkerOptions, say: Say) -> Engine:
    gpu: Any = EmulatedGpu()
    held = weights()
    cache = CudaKVCache(kv_layout(held.config, b"m", "float32", 16, ""), BLOCKS + SPARE, gpu)
    runner = CudaRunner(held, CONFIG, cache, gpu)
    return Engine(runner, CONFIG, cache.layout, "emulated", ahead=runner)


def alone(prompt: list[int], count: int) -> list[int]:
    held = weights()
    cache = KVCache(kv_layout(held.config, b"m", "float32", 16, ""), BLOCKS)
    engine = LocalEngine(ModelRunner(held, CONFIG, cache, CPUBackend()), CONFIG)
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    found: list[int] = []
    while engine.has_work:
        found += [token.token_id for _, token, _ in engine.step()]
    return found


class Tokens(Feeder):
    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.tokens: dict[int, list[int]] = {}

    def _on_event(self, event: Any) -> None:
        rows = event.rows if hasattr(event, "rows") else [(event.key, event.token)] if hasattr(event, "token") else []
        for key, token in rows:
            mine = self.tokens.setdefault(key.request, [])
            if token.index == len(mine):
                mine.append(token.token_id)
        super()._on_event(event)


def test_a_card_is_prepared_for_few_sizes_of_chunks_none_larger_than_it_will_meet() -> None:
    sizes: list[int] = []
    runner = SimpleNamespace(config=replace(CONFIG, max_num_batched_tokens=512))
    runner.step = lambda batch: sizes.append(batch.num_tokens)
    warm_up(runner)
    assert sizes == [256, 128, 128, 64, 64, 32, 32, 16], "a request has at most 256 tokens"


async def test_rows_and_chunks_run_side_by_side_on_a_card_and_every_token_is_right() -> None:
    servicer = SharedServicer(parse(ROLE, ["--model", "random:tiny", "--name", "shared"], {}), emulated)
    described = await servicer.load("127.0.0.1:1", lambda line: None)
    assert "both stages over one pool" in described and "cuda_ipc" in described
    running = asyncio.create_task(servicer.run())
    assert servicer._driver is not None
    feeder = Tokens(servicer._driver)
    prompts = [list(range(5, 45)), list(range(100, 117)), [7] * 90]
    requests = [feeder.start(prompt, 6) for prompt in prompts]
    async with asyncio.timeout(120):
        for request in requests:
            await request.over.wait()
    for number, prompt in enumerate(prompts, 1):
        assert feeder.tokens[number] == alone(prompt, 6)
    feeder.stop()
    running.cancel()
    await asyncio.wait([running])
    await servicer.close()
