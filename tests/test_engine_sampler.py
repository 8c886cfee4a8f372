"""The sampler: filters keep what they should, draws follow the distribution, and a row never feels its batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SampleInput
from engine.philox import philox4x32, uniform
from engine.sampler import prompt_logprobs, sample
from engine.types import SamplingParams, Token

torch.set_num_threads(1)


def one(logits: list[float] | torch.Tensor, index: int = 0, prompt=(), output=(), eos=(), **params) -> Token:
    row = torch.as_tensor(logits, dtype=torch.float32)
    given = SampleInput(SamplingParams(**params), index, prompt, output, frozenset(eos))
    return sample(row[None], [given])[0]


def drawn(logits: list[float], draws: int = 400, **params) -> set[int]:
    """Ids that come up in `draws` tokens of one request."""
    rows = torch.tensor([logits] * draws)
    inputs = [SampleInput(SamplingParams(seed=7, **params), i, (), ()) for i in range(draws)]
    return {token.token_id for token in sample(rows, inputs)}


# ---- the generator ------------------------------------------------------------------------------------------------

# From Random123's tests/kat_vectors, which its authors publish with the paper.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert philox4x32(counter, key) == answer


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_uniform_stays_below_one(seed, index):
    assert 0 <= uniform(seed, index) < 1


def test_uniform_uses_both_halves_of_the_seed_and_the_index():
    assert len({uniform(0, 0), uniform(1, 0), uniform(1 << 32, 0), uniform(0, 1), uniform(1, 1)}) == 5


# ---- greedy -------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equals():
    assert one([1.0, 3.0, 3.0, 2.0], temperature=0).token_id == 1
    assert one([1.0, 3.0, 3.0, 2.0], temperature=0, logit_bias={0: 0.5}).token_id == 1


def test_a_temperature_near_zero_is_greedy_without_overflow():
    assert drawn([1.0, 1.5, -3.0], temperature=1e-300) == {1}


def test_nothing_is_sampled_from_no_rows():
    assert sample(torch.empty(0, 5), []) == []
    assert prompt_logprobs(torch.empty(0, 5), [], 3) == []


# ---- bias, masks, penalties ---------------------------------------------------------------------------------------


def test_logit_bias_moves_the_choice_and_ignores_ids_outside_the_vocabulary():
    assert one([1.0, 2.0, 0.0], temperature=0, logit_bias={2: 2.5, 99: 100.0}).token_id == 2


def test_end_and_stop_tokens_cannot_come_before_min_tokens():
    logits = [5.0, 4.0, 3.0, 1.0]
    ends = {"eos": (0,), "stop_token_ids": (1, 99), "min_tokens": 2, "temperature": 0}
    assert one(logits, index=1, output=(3,), **ends).token_id == 2
    assert one(logits, index=2, output=(3, 3), **ends).token_id == 0
    assert one(logits, index=1, output=(3,), ignore_eos=True, **ends).token_id == 0


def test_repetition_penalty_counts_the_prompt_and_shrinks_both_signs():
    logits = [3.0, 2.0, -1.0, -1.5]
    assert one(logits, prompt=(0, 0), temperature=0, repetition_penalty=2.0).token_id == 1
    assert one([-1.0, -1.5], index=1, output=(0,), temperature=0, repetition_penalty=2.0).token_id == 1


def test_frequency_and_presence_penalties_count_the_output_alone():
    logits = [3.0, 2.5, 2.2]
    assert one(logits, prompt=(0, 0, 0), temperature=0, presence_penalty=1.0).token_id == 0
    assert one(logits, index=2, output=(0, 0), temperature=0, presence_penalty=0.6).token_id == 1
    assert one(logits, index=2, output=(0, 0), temperature=0, frequency_penalty=0.2).token_id == 0
    assert one(logits, index=3, output=(0, 0, 0), temperature=0, frequency_penalty=0.2).token_id == 1


def test_the_given_logits_are_never_changed():
    logits = torch.randn(1, 50)
    before = logits.clone()
    params = SamplingParams(
        seed=1, logit_bias={3: 5.0}, repetition_penalty=1.5, frequency_penalty=1.0, top_k=5, top_p=0.5, logprobs=3
    )
    sample(logits, [SampleInput(params, 2, (1, 2), (3, 4), frozenset((0,)))])
    assert torch.equal(logits, before)


# ---- filters ------------------------------------------------------------------------------------------------------

FLAT = [math.log(p) for p in (0.1, 0.4, 0.2, 0.2, 0.1)]


def test_top_k_keeps_the_best_and_all_that_equal_the_last_of_them():
    assert drawn(FLAT, top_k=1) == {1}
    assert drawn(FLAT, top_k=2) == {1, 2, 3}
    assert drawn(FLAT, top_k=5) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_hold_p_the_lower_id_first():
    assert drawn(FLAT, top_p=0.39) == {1}
    assert drawn(FLAT, top_p=0.59) == {1, 2}
    assert drawn(FLAT, top_p=0.79) == {1, 2, 3}
    assert drawn(FLAT, top_p=0.89) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left():
    assert drawn(FLAT, top_k=2, top_p=0.49) == {1}  # 0.4 of 0.8


def test_min_p_compares_with_the_best():
    assert drawn(FLAT, min_p=0.49) == {1, 2, 3}
    assert drawn(FLAT, min_p=1.0) == {1}


def test_temperature_comes_before_the_filters():
    assert drawn(FLAT, min_p=0.49, temperature=0.5) == {1}


def reference_kept(logits: list[float], params: SamplingParams) -> tuple[set[int], set[int]]:
    """Written out slowly: (ids that must be possible, ids that may be, where rounding decides)."""
    best = max(logits)
    weights = {i: math.exp((x - best) / params.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if params.top_k:
        order = [i for i in order if weights[i] >= weights[order[min(params.top_k, len(order)) - 1]] * (1 - 1e-6)]
    total, before, must, may = sum(weights[i] for i in order), 0.0, set(), set()
    for i in order:
        if params.top_p >= 1 or before < params.top_p * total * (1 - 1e-5):
            must.add(i)
        if params.top_p >= 1 or before < params.top_p * total * (1 + 1e-5):
            may.add(i)
        before += weights[i]
    return (
        {i for i in must if weights[i] >= params.min_p * (1 + 1e-5) or i == order[0]},
        {i for i in may if weights[i] >= params.min_p * (1 - 1e-5)},
    )


@settings(deadline=None, max_examples=80)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_drawn_token_is_one_that_the_filters_keep(logits, temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    must, may = reference_kept(logits, params)
    rows = torch.tensor([logits] * 40)
    tokens = {t.token_id for t in sample(rows, [SampleInput(params, i, (), ()) for i in range(40)])}
    assert tokens <= may
    if len(must) == 1 == len(may):
        assert tokens == must


# ---- the distribution ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        ({}, (0.1, 0.4, 0.2, 0.2, 0.1)),
        ({"temperature": 2.0}, tuple(math.sqrt(p) for p in (0.1, 0.4, 0.2, 0.2, 0.1))),
        ({"top_k": 2}, (0, 0.4, 0.2, 0.2, 0)),
        ({"top_p": 0.89}, (0.1, 0.4, 0.2, 0.2, 0)),
    ],
)
def test_draws_follow_the_distribution(params, weights):
    draws = 4000
    rows = torch.tensor([FLAT] * draws)
    tokens = sample(rows, [SampleInput(SamplingParams(seed=11, **params), i, (), ()) for i in range(draws)])
    counts = [sum(token.token_id == i for token in tokens) for i in range(5)]
    expected = [draws * w / sum(weights) for w in weights]
    assert all(count == 0 for count, e in zip(counts, expected, strict=True) if e == 0)
    chi = sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True) if e > 0)
    assert chi < 18.5  # four degrees of freedom, one in a thousand


def test_a_seed_decides_the_tokens_and_another_seed_gives_others():
    logits = torch.zeros(1000)
    tokens = [one(logits, seed=3).token_id for _ in range(3)]
    assert len(set(tokens)) == 1
    assert len({one(logits, seed=seed).token_id for seed in range(20)}) > 15


# ---- a row and its batch ------------------------------------------------------------------------------------------

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 7, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 5: -100.0}]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, 0, 5]),
    seed=st.integers(0, 2**64 - 1),
)
some_inputs = st.builds(
    SampleInput,
    params=some_params,
    index=st.integers(0, 5),
    prompt=st.lists(st.integers(0, 299), max_size=6),
    output=st.lists(st.integers(0, 299), max_size=6),
    eos=st.just(frozenset((2,))),
)


@settings(deadline=None, max_examples=40)
@given(inputs=st.lists(some_inputs, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_gives_the_same_alone_and_among_others(inputs, seed):
    logits = torch.randn(len(inputs), 300, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, inputs)
    backwards = sample(logits.flip(0), inputs[::-1])[::-1]
    alone = [sample(logits[i : i + 1], [given])[0] for i, given in enumerate(inputs)]
    assert together == alone == backwards


def toy_logits(tokens: list[int]) -> torch.Tensor:
    """A model of nobody: logits that depend on every token so far."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) & 0x7FFFFFFF)
    return torch.randn(60, generator=generator) * 2


def run(prompt: list[int], output: list[int], params: SamplingParams, length: int) -> list[int]:
    output = list(output)
    while len(output) < length:
        given = SampleInput(params, len(output), prompt, list(output), frozenset((0,)))
        output.append(sample(toy_logits(prompt + output)[None], [given])[0].token_id)
    return output


@settings(deadline=None, max_examples=25)
@given(params=some_params, split=st.integers(0, 12))
def test_a_request_resumed_from_its_log_goes_on_with_the_same_tokens(params, split):
    whole = run([5, 6, 7], [], params, 12)
    assert run([5, 6, 7], whole[:split], params, 12) == whole


# ---- logprobs -----------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution_before_bias_and_temperature():
    token = one(FLAT, temperature=0, logit_bias={0: 50.0}, logprobs=2)
    assert token.token_id == 0
    assert token.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert token.logprob.rank == 4
    assert [c.token_id for c in token.logprob.top] == [1, 2]
    assert [c.logprob for c in token.logprob.top] == pytest.approx([math.log(0.4), math.log(0.2)], abs=1e-6)


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_reports_nothing():
    assert one(FLAT, temperature=0, logprobs=0).logprob.top == ()
    assert one(FLAT, temperature=0).logprob is None


def test_more_logprobs_than_tokens_gives_all_tokens():
    assert len(one([1.0, 2.0], temperature=0, logprobs=20).logprob.top) == 2


def test_equal_logits_are_ranked_by_id():
    token = one([1.0] * 40, temperature=0, logit_bias={30: 1.0}, logprobs=3)
    assert token.token_id == 30
    assert token.logprob.rank == 31
    assert [c.token_id for c in token.logprob.top] == [0, 1, 2]


def test_prompt_logprobs_give_each_target_its_rank_and_the_best():
    logits = torch.tensor([FLAT, FLAT[::-1], FLAT])
    reports = prompt_logprobs(logits, [1, 0, 4], 1)
    assert [report.rank for report in reports] == [1, 4, 5]
    assert [report.top[0].token_id for report in reports] == [1, 3, 1]
    assert [report.logprob for report in reports] == pytest.approx([math.log(p) for p in (0.4, 0.1, 0.1)], abs=1e-6)


def test_prompt_logprobs_do_not_depend_on_how_many_rows_are_asked_at_once():
    logits = torch.randn(70, 32003, generator=torch.Generator().manual_seed(0)) * 3
    targets = list(range(70))
    together = prompt_logprobs(logits, targets, 4)
    assert together == [prompt_logprobs(logits[i : i + 1], [i], 4)[0] for i in targets]


# ---- a broken model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers_still_give_an_id_of_the_vocabulary(value):
    for params in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert 0 <= one([value] * 5, seed=1, **params).token_id < 5


def test_logits_of_half_precision_are_taken_as_they_are():
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    kinds = [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.7, "logprobs": 2}, {"min_p": 0.1}]
    inputs = [SampleInput(SamplingParams(seed=1, **kind), 3, (1,), (2, 3, 4)) for kind in kinds]
    with torch.inference_mode():
        assert sample(logits, inputs) == sample(logits.float(), inputs)
