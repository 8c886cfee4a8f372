"""What paged attention asks of a card is decided without one: it fits, and what cannot be done is named."""

from __future__ import annotations

import pytest

from engine.backend.attention import BLOCK_SIZES, HEAD_DIMS, AttentionShape, Geometry, geometries, geometry, kernels

# Shared memory of a multiprocessor, and the most that one block may have: H200, A100, RTX 4090.
CARDS = [(228 << 10, 227 << 10), (164 << 10, 163 << 10), (100 << 10, 99 << 10)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 4, 8, 16, 71])
@pytest.mark.parametrize("card", CARDS[:2], ids=["H200", "A100"])
def test_every_shape_fits_the_large_cards(head_dim: int, group: int, card: tuple[int, int]) -> None:
    found = geometries(AttentionShape("bfloat16", head_dim, group, 16), card[0])
    assert found[0][0] == 1, "a lone row has a kernel"
    for _, chosen in found:
        assert 1 <= chosen.flight < chosen.stages
        assert chosen.shared_bytes + 128 <= card[1]
        assert chosen.ctas * (chosen.shared_bytes + 128 + 1024) <= card[0]
        assert chosen.stages * chosen.warps <= 64 - 12, "a record of the plan holds the block ids of the first stages"


def test_a_card_gets_the_kernels_that_fit_it() -> None:
    shape = AttentionShape("bfloat16", 64, 3, 16)
    h200, a100, small = ([least for least, _ in geometries(shape, shared)] for shared, _ in CARDS)
    assert h200 == [1, 9, 65]
    assert a100 == [1], "its shared memory has no room for the longer rings"
    assert small == [1]
    full_group = geometries(AttentionShape("bfloat16", 64, 8, 16), CARDS[0][0])
    assert [least for least, _ in full_group] == h200, "the sums of 8 query heads fit beside shorter rings"
    assert geometry(shape, CARDS[2][0]).shared_bytes <= CARDS[2][1]


def test_llama_3_fits_a_small_card() -> None:
    shared, most = CARDS[2]
    assert geometry(AttentionShape("bfloat16", 128, 4, 16), shared).shared_bytes <= most


def test_a_shape_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="head dim 256 needs more shared memory than this card's 65536 bytes"):
        geometry(AttentionShape("bfloat16", 256, 8, 16), 65536)


def test_what_no_kernel_supports_is_named_with_what_is() -> None:
    with pytest.raises(ValueError, match="head dim 80 is not supported on CUDA; supported are 64, 96, 128, 256"):
        AttentionShape("bfloat16", 80, 4, 16)
    with pytest.raises(ValueError, match="block size 8 .* supported are 16, 32, 64, 128"):
        AttentionShape("bfloat16", 64, 4, 8)
    with pytest.raises(ValueError, match="no kernel for int8"):
        AttentionShape("int8", 64, 4, 16)


def test_planner_and_attention_are_compiled_with_the_same_settings() -> None:
    shape = AttentionShape("float16", 96, 5, BLOCK_SIZES[1], window=100, softcap=30.0)
    planner, attention = kernels(shape, Geometry(warps=4, stages=2, buffers=1, ctas=2, shared_bytes=0, flight=1))
    settings = dict(attention.settings)
    assert {**settings, **dict(planner.settings)} == {**settings, "MERGE": 0}
    assert (settings["DTYPE"], settings["WINDOW"], settings["SOFTCAP"]) == (2, 100, 1)
