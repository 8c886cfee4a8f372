"""What may enter: numbers in every refusal, and max_tokens that always fits both stages."""

from __future__ import annotations

import pytest

from engine.messages import KvLayout, Node, WorkerHello
from engine.types import SamplingParams
from router.admission import (
    BadResume,
    Limit,
    Overloaded,
    RouterConfig,
    TooLong,
    check_queue,
    check_resume,
    fit,
    limit_of,
)
from router.workers import Role, Workers

LAYOUT = KvLayout(b"\x01" * 32, "float32", 16, 2, 2, 64, 8192, "torch 2")
LIMIT = Limit(100, "the model's length of 100 tokens")


def workers(prefill_blocks: int, decode_blocks: int, length: int = 4096) -> Workers:
    found = Workers()
    for name, role, blocks in (("p1", Role.PREFILL, prefill_blocks), ("d1", Role.DECODE, decode_blocks)):
        found.up(name, role, WorkerHello(Node(name, 1, name), LAYOUT, blocks, 8, length), 0.0)
    return found


@pytest.mark.parametrize(("prefill", "decode"), [(10, 20), (20, 10)])
def test_the_smaller_pool_of_either_stage_is_the_limit(prefill: int, decode: int) -> None:
    limit = limit_of(workers(prefill, decode))
    assert limit is not None and limit.tokens == 160
    assert "10 blocks of 16 tokens" in limit.cause


def test_the_model_is_the_limit_when_the_pools_are_larger() -> None:
    limit = limit_of(workers(1000, 1000, length=512))
    assert limit == Limit(512, "the model's length of 512 tokens")


def test_with_one_stage_missing_nothing_is_known() -> None:
    found = workers(10, 10)
    found.down("d1", Role.DECODE, 1.0)
    assert limit_of(found) is None


def test_what_fits_exactly_fits() -> None:
    params = SamplingParams(max_tokens=10)
    assert fit(90, 0, params, LIMIT) is params
    with pytest.raises(TooLong) as error:
        fit(91, 0, params, LIMIT)
    assert str(error.value) == (
        "the prompt has 91 tokens and max_tokens is 10, but the model's length of 100 tokens allows 100 in all; "
        "with this prompt max_tokens may be 9, with this max_tokens the prompt may have 90"
    )


@pytest.mark.parametrize(
    ("prompt", "wanted", "fitting"),
    [
        (150, 10, "with this max_tokens the prompt may have 90"),
        (90, 100, "with this prompt max_tokens may be 10"),
        (100, 100, "neither may be more than 99"),
    ],
)
def test_only_what_fits_is_said_to_fit(prompt: int, wanted: int, fitting: str) -> None:
    with pytest.raises(TooLong) as error:
        fit(prompt, 0, SamplingParams(max_tokens=wanted), LIMIT)
    assert str(error.value).endswith(f"allows 100 in all; {fitting}")


def test_max_tokens_defaults_to_all_that_fits() -> None:
    assert fit(60, 0, SamplingParams(), LIMIT).max_tokens == 40
    with pytest.raises(TooLong, match="largest prompt that fits has 99"):
        fit(100, 0, SamplingParams(), LIMIT)
    with pytest.raises(TooLong, match="at least 50 must follow"):
        fit(60, 0, SamplingParams(min_tokens=50), LIMIT)


def test_a_resume_needs_room_for_what_it_holds_and_one_more() -> None:
    assert fit(60, 39, SamplingParams(), LIMIT).max_tokens == 40
    with pytest.raises(TooLong):
        fit(60, 40, SamplingParams(), LIMIT)
    check_resume(4, SamplingParams(max_tokens=5))
    with pytest.raises(BadResume, match="resume holds 5 tokens, but max_tokens is 5"):
        check_resume(5, SamplingParams(max_tokens=5))


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    config = RouterConfig(max_concurrent_requests=4, max_queued_requests=2)
    check_queue(4, 1, config)
    with pytest.raises(Overloaded, match="4 running and 2 waiting") as error:
        check_queue(4, 2, config)
    assert error.value.code == "RESOURCE_EXHAUSTED" and error.value.retry_after > 0
