"""A runner's tokens are transformers', its bits are the same in any company, and the fake one notices wrong KV."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache as once

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import token_parity
from engine.backend.cpu import CPUBackend
from engine.batch import Batch, DigestRequest, Row, SampleInput
from engine.config import EngineConfig, ModelConfig, RopeConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.kv_cache import KVCache, kv_layout
from engine.models.llama import Llama
from engine.runner import ModelRunner
from engine.types import SamplingParams

GREEDY = SamplingParams(temperature=0)
NUM_BLOCKS = 64
CONFIG = ModelConfig("LlamaForCausalLM", 301, 96, 192, 3, 6, 2, 16, 1e-5, 512, RopeConfig(), tie_word_embeddings=True)


@once
def model() -> Llama:
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (0.3 if len(shape) > 1 else 1)

    tensors = {"model.embed_tokens.weight": weight(301, 96), "model.norm.weight": torch.ones(96)}
    for i in range(3):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        tensors |= {f"{at}.q_proj.weight": weight(96, 96), f"{at}.o_proj.weight": weight(96, 96)}
        tensors |= {f"{at}.k_proj.weight": weight(32, 96), f"{at}.v_proj.weight": weight(32, 96)}
        tensors |= {f"{mlp}.gate_proj.weight": weight(192, 96), f"{mlp}.up_proj.weight": weight(192, 96)}
        tensors |= {f"{mlp}.down_proj.weight": weight(96, 192)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(96)
    return Llama(CONFIG, tensors)


def make_runner(row_tile: int | None = None, dtype: str = "float32") -> ModelRunner:
    cache = KVCache(kv_layout(CONFIG, b"", dtype, 16, ""), NUM_BLOCKS)
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=512, row_tile=row_tile)
    return ModelRunner(model(), config, cache, CPUBackend())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(301) for _ in range(length)]


def sampling(index: int = 0, output: Sequence[int] = (), params: SamplingParams = GREEDY) -> SampleInput:
    return SampleInput(params, index, [], output)


# ---- tokens -------------------------------------------------------------------------------------------------------


def test_tokens_equal_transformers_alone_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert token_parity.run("random:tiny", quick=True, tokens=24, path=None) == 0
    assert "differences that count: 0" in capsys.readouterr().out


def test_results_come_back_in_the_order_of_the_rows() -> None:
    prompts = [prompt_of(n, seed=n) for n in (30, 1, 47, 2, 1)]
    tables = [[i * 4 + j for j in range(4)] for i in range(5)]
    rows = [Row(i, prompts[i], 0, tables[i], sampling(i)) for i in range(5)]
    rows[2].sample = None
    together = make_runner().step(Batch(rows)).tokens
    assert together[2] is None
    for i in (0, 1, 3, 4):
        alone = make_runner().step(Batch([rows[i]])).tokens[0]
        assert alone is not None
        assert alone.index == i
        assert together[i] == alone


def test_logprobs_of_a_prompt_are_those_of_its_tokens_whatever_the_chunks() -> None:
    prompt = prompt_of(40)
    runner = make_runner()
    row = Row(0, prompt, 0, [0, 1, 2], sampling(), prompt_logprobs=3, targets=prompt[1:])
    whole = runner.step(Batch([row])).prompt_logprobs[0]
    assert [report.token_id for report in whole] == prompt[1:]
    assert all(len(report.top) == 3 for report in whole)
    pieces = []
    for start, end in ((0, 16), (16, 17), (17, 40)):
        row = Row(0, prompt[start:end], start, [5, 6, 7], None, 3, prompt[start + 1 : end + 1])
        pieces += runner.step(Batch([row])).prompt_logprobs[0]
    assert [report.token_id for report in pieces] == prompt[1:]
    for a, b in zip(whole, pieces, strict=True):
        assert a.logprob is not None
        assert b.logprob is not None
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-4)


def test_a_digest_is_taken_after_the_step_and_a_zeroed_block_before_it() -> None:
    runner = make_runner()
    runner.cache.data[3] = float("nan")
    prompt = prompt_of(20)
    ask = [DigestRequest(2, 0, prompt[:16]), DigestRequest(3, 1, prompt[16:])]
    output = runner.step(Batch([Row(0, prompt, 0, [2, 3], sampling())], zero_blocks=[3], digests=ask))
    assert output.digests == [runner.cache.digest(2, 0, prompt[:16]), runner.cache.digest(3, 1, prompt[16:])]
    assert not runner.cache.data[3].isnan().any()
    assert output.seconds > 0
    # A decode row reads the whole last block: had its tail been left as NaN, every later token would be lost.
    token = runner.step(Batch([Row(0, [5], 20, [2, 3], sampling(1))])).tokens[0]
    fresh = make_runner()
    fresh.step(Batch([Row(0, prompt, 0, [2, 3], sampling())]))
    assert token == fresh.step(Batch([Row(0, [5], 20, [2, 3], sampling(1))])).tokens[0]


def test_an_empty_batch_only_zeroes_and_digests() -> None:
    runner = make_runner()
    output = runner.step(Batch(digests=[DigestRequest(0, 0, [])]))
    assert (output.tokens, output.prompt_logprobs) == ([], [])
    assert len(output.digests) == 1


def test_a_row_that_its_blocks_cannot_hold_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="1 blocks hold 16 tokens, not 17"):
        make_runner().step(Batch([Row(0, prompt_of(17), 0, [0])]))


# ---- bits ---------------------------------------------------------------------------------------------------------

PROMPT = prompt_of(60, seed=9)


def kv_bits(runner: ModelRunner, blocks: list[int]) -> torch.Tensor:
    """[layers, 2, kv_heads, 60, head_dim] of the sequence in these blocks."""
    return runner.cache.data[blocks].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :60].clone()


def run_bits(cuts: list[int], mates: int, rng: random.Random, row_tile: int) -> torch.Tensor:
    """KV of PROMPT, computed in chunks that end at `cuts`, beside `mates` other rows at random places of the batch."""
    runner = make_runner(row_tile)
    blocks = rng.sample(range(32), 4)
    for start, end in zip([0, *cuts], [*cuts, 60], strict=True):
        rows = [
            Row(9 + i, prompt_of(rng.choice((1, 1, 2, 17)), i), rng.randrange(12), [32 + 2 * i, 33 + 2 * i])
            for i in range(mates)
        ]
        rows.insert(rng.randrange(len(rows) + 1), Row(0, PROMPT[start:end], start, blocks))
        runner.step(Batch(rows))
    return kv_bits(runner, blocks)


@once
def bits_alone(row_tile: int) -> torch.Tensor:
    return run_bits([], 0, random.Random(0), row_tile)


@pytest.mark.parametrize("row_tile", [1, 8, 16])
@given(st.sets(st.integers(1, 59), max_size=12), st.integers(0, 8), st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None)
def test_a_row_tile_makes_bits_independent_of_mates_and_chunks(
    row_tile: int, cuts: set[int], mates: int, rng: random.Random
) -> None:
    assert torch.equal(run_bits(sorted(cuts), mates, rng, row_tile), bits_alone(row_tile))


def test_token_by_token_has_the_bits_of_one_chunk() -> None:
    assert torch.equal(run_bits(list(range(1, 60)), 3, random.Random(4), 8), bits_alone(8))


def test_a_row_tile_makes_bits_independent_of_threads() -> None:
    expected = bits_alone(8)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(run_bits([7, 33], 2, random.Random(1), 8), expected)
    finally:
        torch.set_num_threads(threads)


# ---- the fake -----------------------------------------------------------------------------------------------------


def fake_run(
    runner: FakeRunner, chunks: list[int], spoil: Callable[[FakeRunner], None] = lambda runner: None
) -> list[int]:
    prompt, blocks, start = PROMPT[:10], [3, 0, 2, 6], 0
    output: list[int] = []
    for size in chunks:
        end = start + size
        sample = sampling() if end == 10 else None
        token = runner.step(Batch([Row(0, prompt[start:end], start, blocks, sample)])).tokens[0]
        start = end
    assert token is not None
    output.append(token.token_id)
    spoil(runner)
    while len(output) < 5:
        row = Row(0, output[-1:], 9 + len(output), blocks, sampling(len(output), output))
        token = runner.step(Batch([row])).tokens[0]
        assert token is not None
        output.append(token.token_id)
    return output


def test_the_fake_gives_the_hand_calculated_tokens_whatever_the_chunks() -> None:
    expected = fake_tokens(PROMPT[:10], 5)
    assert fake_run(FakeRunner(4, 8), [10]) == expected
    assert fake_run(FakeRunner(4, 8), [3, 1, 6]) == expected


def swap(runner: FakeRunner) -> None:
    a, b = runner.read_block(3), runner.read_block(0)
    runner.write_block(3, b)
    runner.write_block(0, a)


@pytest.mark.parametrize(
    "spoil", [swap, lambda runner: runner.cache.zero([0]), lambda runner: runner.write_block(3, bytes(31) + b"\1")]
)
def test_the_fake_notices_swapped_missing_and_changed_blocks(spoil: Callable[[FakeRunner], None]) -> None:
    expected = fake_tokens(PROMPT[:10], 5)
    found = fake_run(FakeRunner(4, 8), [10], spoil)
    assert found[0] == expected[0]
    assert found[1:] != expected[1:]


def test_the_fakes_kv_can_be_carried_to_another_runner() -> None:
    there = FakeRunner(4, 8)

    def carry(runner: FakeRunner) -> None:
        for block in (3, 0, 2):
            there.cache.block_bytes(block)[:] = runner.cache.block_bytes(block)
            assert there.cache.digest(block, 0, [1]) == runner.cache.digest(block, 0, [1])

    expected = fake_tokens(PROMPT[:10], 5)
    first = fake_run(FakeRunner(4, 8), [10], carry)[0]
    row = Row(0, [first], 10, [3, 0, 2], sampling(1, [first]))
    token = there.step(Batch([row])).tokens[0]
    assert token is not None
    assert token.token_id == expected[1]


def test_the_fake_counts_seed_index_ends_and_logprobs() -> None:
    warm = SamplingParams(temperature=1, seed=4)
    assert fake_tokens([1, 2], 6, params=warm) != fake_tokens([1, 2], 6, params=SamplingParams(temperature=1, seed=5))
    first = fake_tokens([1, 2], 1)[0]
    later = SamplingParams(temperature=0, min_tokens=1, max_tokens=9)
    assert fake_tokens([1, 2], 1, params=later, eos=frozenset([first]))[0] == first + 1
    asks = SamplingParams(temperature=0, logprobs=2)
    row = Row(0, [1, 2], 0, [0], sampling(params=asks), prompt_logprobs=1, targets=[2])
    output = FakeRunner(4, 1).step(Batch([row]))
    token = output.tokens[0]
    assert token is not None
    assert token.logprob is not None
    assert (token.logprob.token_id, len(token.logprob.top)) == (first, 2)
    assert [report.token_id for report in output.prompt_logprobs[0]] == [2]
