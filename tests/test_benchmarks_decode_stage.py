"""The decode stage that benchmarks.engine_gpu times: its requests join, run and leave as a decode worker's."""

from __future__ import annotations

import random

import torch
from test_engine_cuda_runner import emulated

from benchmarks.decode_stage import DecodeStage
from engine.config import EngineConfig
from engine.types import SamplingParams


def test_every_request_gets_its_tokens_and_leaves_no_block_behind() -> None:
    config = EngineConfig(block_size=16, num_blocks=64, max_num_seqs=8, max_model_len=128)
    runner = emulated(config)
    runner.cache.data.zero_()  # nobody copies what the prompts' blocks hold
    stage, rng, wanted = DecodeStage(runner, config), random.Random(0), 0
    with torch.inference_mode():
        for _ in range(30):
            count = rng.randint(2, 6)
            wanted += count - 1  # the first token is the prefill's
            params = SamplingParams(temperature=0, seed=0, max_tokens=count, ignore_eos=True)
            stage.add([rng.randrange(5, 90) for _ in range(rng.randint(3, 40))], params)
        ended = sum(stage.step() for _ in range(200))
    assert (ended, stage.rows) == (30, wanted)
    assert stage.decoder.idle
    stage.decoder.audit()
