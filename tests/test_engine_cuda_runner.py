"""The CUDA runner's own logic on an emulated card: its tokens are the CPU runner's, and it sends only what changed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedGpu
from gains_and_biases import MIXED, mixed_tensors

from engine.backend import lanes
from engine.backend.compile import step_kernels
from engine.backend.cpu import CPUBackend
from engine.batch import Batch, Row, SampleInput
from engine.config import EngineConfig, ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_runner import CudaRunner
from engine.kv_cache import KVCache, kv_layout
from engine.loader.random_shapes import SHAPES
from engine.loader.random_weights import random_tensors
from engine.models.cuda_products import fold_norms
from engine.models.llama import Llama
from engine.runner import ModelRunner
from engine.types import SamplingParams, Token, TokenLogprob
from pagewire.local_engine import LocalEngine

MODEL = ModelConfig.from_dict(SHAPES["tiny"], {"eos_token_id": [2, 0]})
Produced = tuple[list[list[Token]], list[list[TokenLogprob]]]


@cache
def weights() -> Llama:
    return Llama(MODEL, random_tensors(MODEL, 0, torch.float32, lambda *_: None))


def on_cpu(config: EngineConfig) -> ModelRunner:
    layout = kv_layout(MODEL, b"m", "float32", config.block_size, "")
    return ModelRunner(weights(), config, KVCache(layout, config.num_blocks), CPUBackend())


def emulated(config: EngineConfig, warm: bool = False) -> CudaRunner:
    gpu: Any = EmulatedGpu()
    layout = kv_layout(MODEL, b"m", "float32", config.block_size, "")
    runner = CudaRunner(weights(), config, CudaKVCache(layout, config.num_blocks, gpu), gpu)
    if warm:
        runner.warm_up()
    return runner


def run(runner: Any, config: EngineConfig, prompts: list[list[int]], params: list[SamplingParams]) -> Produced:
    engine = LocalEngine(runner, config)
    numbers = [engine.add_request(*both) for both in zip(prompts, params, strict=True)]
    tokens: dict[int, list[Token]] = {number: [] for number in numbers}
    while engine.has_work:
        for number, token, _ in engine.step():
            tokens[number].append(token)
        engine.audit()
    return [tokens[number] for number in numbers], [list(engine.prompt_logprobs.get(number, ())) for number in numbers]


def some_params(rng: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0 if rng.random() < 0.6 else 0.8,
        seed=seed,
        max_tokens=rng.choice((1, 3, 20)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        logit_bias={7: 3.0} if rng.random() < 0.2 else {},
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=[rng.randrange(320)],
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, 1)),
    )


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_cpu_runners_whatever_the_company_the_chunks_and_the_pool(seed: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=rng.choice((16, 32)),
        num_blocks=rng.choice((20, 60)),  # 20: requests give way to each other
        max_num_seqs=rng.choice((3, 5, 8)),
        max_num_batched_tokens=rng.choice((16, 40, 200)),
        max_model_len=256,
    )
    prompts = [[rng.randrange(3, 320) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))] for _ in range(6)]
    params = [some_params(rng, number) for number in range(6)]
    expected, reports = run(on_cpu(config), config, prompts, params)
    found, other_reports = run(emulated(config, warm=seed % 2 == 0), config, prompts, params)
    assert [[t.token_id for t in one] for one in found] == [[t.token_id for t in one] for one in expected]
    assert [[t.logprob is None for t in one] for one in found] == [[t.logprob is None for t in one] for one in expected]
    assert [[r.token_id for r in one] for one in other_reports] == [[r.token_id for r in one] for one in reports]


def decode_row(slot: int, token: int | None, position: int, blocks: list[int], output: list[int], index: int) -> Row:
    params = PARAMS.setdefault(slot, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    return Row(slot, () if token is None else (token,), position, blocks, SampleInput(params, index, [5], output))


PARAMS: dict[int, SamplingParams] = {}


def test_two_steps_may_be_launched_before_the_first_is_read() -> None:
    config = EngineConfig(block_size=16, num_blocks=8, max_num_seqs=4, max_model_len=64)
    runner, output, blocks = emulated(config), [9], [3]
    runner.step(Batch([Row(9, [5], 0, blocks)]))  # the prompt's only token
    first = runner.submit(Batch([decode_row(0, 9, 1, blocks, output, 1)]))
    second = runner.submit(Batch([decode_row(0, None, 2, blocks, output, 2)]))
    tokens = [runner.collect(launched).tokens[0] for launched in (first, second)]
    plain = on_cpu(config)
    plain.step(Batch([Row(9, [5], 0, blocks)]))
    one = plain.step(Batch([decode_row(0, 9, 1, blocks, output, 1)])).tokens[0]
    assert one is not None and tokens[0] is not None and tokens[0].token_id == one.token_id
    two = plain.step(Batch([decode_row(0, one.token_id, 2, blocks, output, 2)])).tokens[0]
    assert two is not None and tokens[1] is not None and (tokens[1].index, tokens[1].token_id) == (2, two.token_id)


def test_a_row_that_goes_on_is_not_sent_again_and_one_without_a_block_waits_for_it() -> None:
    config = EngineConfig(block_size=16, num_blocks=8, max_num_seqs=4, max_model_len=64)
    runner, output, blocks = emulated(config), [9], [3]
    sent: list[int] = []
    state = runner._state
    flush = state.flush
    state.flush = lambda: (sent.append(len(state._to)), flush())[1]  # type: ignore[method-assign,func-returns-value]
    token = 9
    for position in range(1, 18):
        if position == 16:
            blocks.append(4)
        found = runner.step(Batch([decode_row(0, token, position, blocks, output, position)])).tokens[0]
        assert found is not None
        token = found.token_id
    assert sent[0] > 5 and sent[1:15] == [0] * 14  # it joins, and goes on by itself
    assert sent[15] > 0 and sent[16] == 0  # position 16 came with the second block


def test_a_batch_that_shrank_runs_a_smaller_graph_and_its_tokens_stay_the_same() -> None:
    config = EngineConfig(block_size=16, num_blocks=80, max_num_seqs=8, max_num_batched_tokens=200, max_model_len=64)
    prompts = [[5 + i, 6, 7] for i in range(7)]
    params = [
        SamplingParams(seed=i, max_tokens=20 if i in (2, 6) else 3, ignore_eos=True, repetition_penalty=1.0 + i % 2)
        for i in range(7)
    ]  # numbers 2 and 6 have places in the middle and at the end
    expected, _ = run(on_cpu(config), config, prompts, params)
    runner, sizes = emulated(config), list[int]()
    decode = runner._decode
    runner._decode = lambda rows: (sizes.append(rows), decode(rows))[1]  # type: ignore[method-assign,func-returns-value]
    found, _ = run(runner, config, prompts, params)
    assert [[t.token_id for t in one] for one in found] == [[t.token_id for t in one] for one in expected]
    assert sizes[0] == 8 and sizes[-1] == 2


def test_every_kernel_that_it_launches_is_among_those_compiled_ahead() -> None:
    config = EngineConfig(block_size=16, num_blocks=80, max_num_seqs=70, max_num_batched_tokens=40, max_model_len=64)
    runner = emulated(config, warm=True)
    penalized = SamplingParams(seed=1, max_tokens=3, repetition_penalty=1.2)
    run(runner, config, [[5, 6, 7], list(range(40))], [penalized, penalized])
    ahead = set(step_kernels(MODEL, "float32", 16, "sm_90a"))
    gpu: Any = runner.gpu
    assert len(gpu.kernels) > 12 and gpu.kernels <= ahead


def logprobs_of(runner: ModelRunner, config: EngineConfig) -> list[float]:
    engine = LocalEngine(runner, config)
    number = engine.add_request(list(range(5, 100)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    while engine.has_work:
        engine.step()
    return [report.logprob for report in engine.prompt_logprobs[number] if report.logprob is not None]


def test_gains_of_norms_may_be_multiplied_into_the_weights_behind_them_and_nothing_else_changes() -> None:
    config = EngineConfig(block_size=16, num_blocks=20, max_num_seqs=2, max_num_batched_tokens=40, max_model_len=128)
    layout = kv_layout(MIXED, b"m", "float32", 16, "")
    held = Llama(MIXED, mixed_tensors(torch.float32))
    kept = [tensor.clone() for tensor in (held.embed, held.head, held.norm, held.layers[0].out, held.layers[0].down)]
    plain = logprobs_of(ModelRunner(held, config, KVCache(layout, 20), CPUBackend()), config)
    fold_norms(held)
    fold_norms(held)  # of weights that a second runner is given
    folded = logprobs_of(ModelRunner(held, config, KVCache(layout, 20), CPUBackend()), config)
    assert len(plain) == len(folded) > 90 and folded == pytest.approx(plain, abs=1e-3)
    others = (held.embed, held.head, held.norm, held.layers[0].out, held.layers[0].down)
    assert all(torch.equal(one, before) for one, before in zip(others, kept, strict=True))


def test_biases_gains_and_a_sliding_window_give_the_cpus_tokens() -> None:
    config = EngineConfig(block_size=16, num_blocks=60, max_num_seqs=5, max_num_batched_tokens=40, max_model_len=256)
    layout = kv_layout(MIXED, b"m", "float32", 16, "")
    gpu: Any = EmulatedGpu()
    prompts = [list(range(5, 5 + count)) for count in (1, 16, 39, 70)]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 4
    held = Llama(MIXED, mixed_tensors(torch.float32))
    plain = ModelRunner(held, config, KVCache(layout, 60), CPUBackend())
    card = CudaRunner(held, config, CudaKVCache(layout, 60, gpu), gpu)
    expected, found = (run(runner, config, prompts, params)[0] for runner in (plain, card))
    assert [[t.token_id for t in one] for one in found] == [[t.token_id for t in one] for one in expected]


def test_rows_in_two_lanes_get_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "ROWS", range(2, 100))
    config = EngineConfig(
        block_size=16, num_blocks=64, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=128, dtype="float32"
    )
    runner = emulated(config)
    steps = runner.model._steps
    lane = steps._whole[0][1]
    steps._halves = lane, replace(lane, gpu=lane.gpu.twin())
    prompts = [[3 + i, *range(10, 14 + 5 * i)] for i in range(5)]
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=4 + 3 * i) for i in range(5)]
    assert run(runner, config, prompts, params)[0] == run(on_cpu(config), config, prompts, params)[0]


def test_a_request_that_is_cancelled_while_its_step_is_in_flight_leaves_nothing_behind() -> None:
    config = EngineConfig(block_size=16, num_blocks=8, max_num_seqs=2, max_model_len=64)
    engine = LocalEngine(emulated(config), config)
    number = engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.cancel(number)
    engine.audit()
    assert run_out(engine) == []
    engine.audit()


def run_out(engine: LocalEngine) -> list[Token]:
    tokens: list[Token] = []
    while engine.has_work:
        tokens += [token for _, token, _ in engine.step()]
    return tokens
