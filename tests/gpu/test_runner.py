"""The CUDA runner on a card: float32 tokens are the CPU backend's, whatever the company, the chunks and the blocks.

In 16 bits the two ways to compute a token, as the last of a prompt and as a decode step, have to agree.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gains_and_biases import MIXED, mixed_tensors  # noqa: E402

from engine import cuda_runner  # noqa: E402
from engine.backend.cpu import CPUBackend  # noqa: E402
from engine.backend.cuda import Gpu  # noqa: E402
from engine.config import EngineConfig, ModelConfig  # noqa: E402
from engine.cuda_cache import CudaKVCache  # noqa: E402
from engine.cuda_runner import CudaRunner  # noqa: E402
from engine.kv_cache import KVCache, kv_layout  # noqa: E402
from engine.loader.random_shapes import SHAPES  # noqa: E402
from engine.loader.random_weights import random_tensors  # noqa: E402
from engine.models.llama import Llama  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.types import SamplingParams, Token  # noqa: E402
from pagewire.local_engine import LocalEngine  # noqa: E402

pytestmark = pytest.mark.gpu


@cache
def gpu() -> Gpu:
    return Gpu()


def model_of(shape: str) -> ModelConfig:
    return ModelConfig.from_dict(SHAPES[shape], {"eos_token_id": [2, 0]})


@cache
def weights(shape: str, dtype: torch.dtype, device: str) -> Llama:
    tensors = random_tensors(model_of(shape), 0, dtype, lambda *_: None)
    return Llama(model_of(shape), {name: tensor.to(device) for name, tensor in tensors.items()})


def config_of(block_size: int, **changes: Any) -> EngineConfig:
    sizes = {"num_blocks": 256, "max_num_seqs": 5, "max_num_batched_tokens": 128, "max_model_len": 512}
    return EngineConfig(**{"block_size": block_size, **sizes, **changes})


def on_cpu(shape: str, config: EngineConfig) -> ModelRunner:
    layout = kv_layout(model_of(shape), b"m", "float32", config.block_size, "")
    return ModelRunner(weights(shape, torch.float32, "cpu"), config, KVCache(layout, config.num_blocks), CPUBackend())


def on_card(shape: str, config: EngineConfig, dtype: str = "float32") -> CudaRunner:
    layout = kv_layout(model_of(shape), b"m", dtype, config.block_size, "")
    held = weights(shape, getattr(torch, dtype), "cuda")
    runner = CudaRunner(held, config, CudaKVCache(layout, config.num_blocks, gpu()), gpu())
    runner.warm_up()
    return runner


def produced(
    runner: Any, config: EngineConfig, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[Token]]:
    engine = LocalEngine(runner, config)
    numbers = [engine.add_request(*both) for both in zip(prompts, params, strict=True)]
    tokens: dict[int, list[Token]] = {number: [] for number in numbers}
    while engine.has_work:
        for number, token, _ in engine.step():
            tokens[number].append(token)
    engine.audit()
    return [tokens[number] for number in numbers]


def some_prompts(vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 100, 100, 127, 300)]


@pytest.mark.parametrize(("shape", "block_size"), [("tiny", 16), ("tiny", 64), ("smollm2-135m", 16)])
def test_tokens_are_those_of_the_cpu(shape: str, block_size: int) -> None:
    config = config_of(block_size)
    prompts = some_prompts(model_of(shape).vocab_size, block_size)
    rng = random.Random(1)
    params = [
        SamplingParams(
            temperature=0 if i % 2 == 0 else 0.8, seed=i, max_tokens=rng.choice((1, 24, 40)), ignore_eos=i % 3 == 0,
            top_p=rng.choice((1.0, 0.9)), repetition_penalty=rng.choice((1.0, 1.2)), logprobs=rng.choice((None, 2)),
            logit_bias={7: 2.0} if i == 3 else {}, min_tokens=1, stop_token_ids=[11],
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    expected = produced(on_cpu(shape, config), config, prompts, params)
    found = produced(on_card(shape, config), config, prompts, params)
    for one, other in zip(expected, found, strict=True):
        assert [token.token_id for token in one] == [token.token_id for token in other]
        for left, right in zip(one, other, strict=True):
            if left.logprob is not None:
                assert right.logprob is not None and left.logprob.logprob is not None
                assert abs(left.logprob.logprob - (right.logprob.logprob or 0)) < 2e-3


def test_few_blocks_make_requests_wait_and_change_no_token() -> None:
    prompts = some_prompts(320, 3)
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * len(prompts)
    config = config_of(16, num_blocks=30)
    assert _ids(produced(on_card("tiny", config), config, prompts, params)) == _ids(
        produced(on_cpu("tiny", config), config, prompts, params)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_has_the_same_probability_as_prompt_and_as_output(dtype: str) -> None:
    config = config_of(16, max_num_seqs=40, num_blocks=2000, max_num_batched_tokens=400)
    runner = on_card("smollm2-135m", config, dtype)
    prompts = some_prompts(49152, 5) * 4
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)] * len(prompts)
    tokens = produced(runner, config, prompts, params)
    engine = LocalEngine(runner, config)
    again = [prompt + [token.token_id for token in out] for prompt, out in zip(prompts, tokens, strict=True)]
    numbers = [engine.add_request(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)) for ids in again]
    while engine.has_work:
        engine.step()
    differences = []
    for number, out in zip(numbers, tokens, strict=True):
        for token, report in zip(out, engine.prompt_logprobs[number][-len(out) :], strict=True):
            assert token.logprob is not None and report.logprob is not None
            differences.append(abs((token.logprob.logprob or 0) - report.logprob))
    # Logits of this model have a deviation of 3; rounding to 16 bits 150 times moves each a little.
    assert sum(differences) / len(differences) < 0.06 and max(differences) < 0.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gains_biases_and_a_sliding_window_count_in_16_bits(dtype: str) -> None:
    """Rows enough for products on Hopper's matrix units, whose weights have the norms' gains in them."""
    config = config_of(16, max_num_seqs=40, num_blocks=600, max_num_batched_tokens=200)
    tensors = mixed_tensors(getattr(torch, dtype))
    held = Llama(MIXED, {name: tensor.to("cuda") for name, tensor in tensors.items()})
    layout = kv_layout(MIXED, b"m", dtype, config.block_size, "")
    runner = CudaRunner(held, config, CudaKVCache(layout, config.num_blocks, gpu()), gpu())
    runner.warm_up()
    prompts = some_prompts(MIXED.vocab_size, 7)[:9] * 5
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)] * len(prompts)
    tokens = produced(runner, config, prompts, params)
    wide = Llama(MIXED, {name: tensor.float() for name, tensor in tensors.items()})
    layout = kv_layout(MIXED, b"m", "float32", config.block_size, "")
    engine = LocalEngine(ModelRunner(wide, config, KVCache(layout, config.num_blocks), CPUBackend()), config)
    again = [prompt + [token.token_id for token in out] for prompt, out in zip(prompts, tokens, strict=True)]
    numbers = [engine.add_request(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)) for ids in again]
    while engine.has_work:
        engine.step()
    differences = []
    for number, out in zip(numbers, tokens, strict=True):
        for token, report in zip(out, engine.prompt_logprobs[number][-len(out) :], strict=True):
            assert token.logprob is not None and report.logprob is not None
            differences.append(abs((token.logprob.logprob or 0) - report.logprob))
    assert sum(differences) / len(differences) < 0.06 and max(differences) < 0.6


def test_a_runner_does_not_begin_before_torch_has_filled_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(cuda_runner.BatchState):
        def __init__(self, *arguments: Any) -> None:
            torch.cuda._sleep(500_000_000)  # cycles, on torch's own stream: a quarter of a second
            super().__init__(*arguments)

    config = config_of(16)
    prompts = some_prompts(320, 4)
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)] * len(prompts)
    expected = _ids(produced(on_card("tiny", config), config, prompts, params))  # every kernel is in the cache now
    spoilt = [torch.full((1 << 20,), 1 << 30, dtype=torch.int32, device="cuda") for _ in range(8)]
    del spoilt  # what the state's memory holds before it is filled
    monkeypatch.setattr(cuda_runner, "BatchState", Late)
    assert _ids(produced(on_card("tiny", config), config, prompts, params)) == expected


def _ids(tokens: list[list[Token]]) -> list[list[int]]:
    return [[token.token_id for token in one] for one in tokens]
