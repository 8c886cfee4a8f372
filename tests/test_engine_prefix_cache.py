"""Names of blocks: fixed bytes, nothing shared across tenants, and never so many that the last token is cached."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.prefix_cache import block_digest, chain, reusable, root_digest

ROOT = root_digest(b"tenant", b"model", "", "float32", 4)


def test_the_layout_of_a_name_is_fixed() -> None:
    assert (
        block_digest(b"\x01" * 32, [1, 2**32 - 1])
        == hashlib.sha256(b"\x01" * 32 + bytes([1, 0, 0, 0, 255, 255, 255, 255])).digest()
    )
    fields = [b"tenant", b"model", b"", b"float32"]
    layout = b"pagewire-kv-1" + b"".join(struct.pack("<I", len(part)) + part for part in fields) + struct.pack("<I", 4)
    assert hashlib.sha256(layout).digest() == ROOT


@pytest.mark.parametrize(
    "other",
    [
        root_digest(b"other", b"model", "", "float32", 4),
        root_digest(b"tenant", b"other", "", "float32", 4),
        root_digest(b"tenant", b"model", "adapter", "float32", 4),
        root_digest(b"tenant", b"model", "", "bfloat16", 4),
        root_digest(b"tenant", b"model", "", "float32", 8),
        root_digest(b"tenantm", b"odel", "", "float32", 4),
    ],
)
def test_nothing_is_shared_across_roots(other: bytes) -> None:
    assert set(chain(ROOT, range(16), 4)).isdisjoint(chain(other, range(16), 4))


def test_only_full_blocks_have_names_and_each_depends_on_all_before_it() -> None:
    assert [len(chain(ROOT, range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    same, other = chain(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], 4), chain(ROOT, [9, 2, 3, 4, 5, 6, 7, 8], 4)
    assert same[0] != other[0] and same[1] != other[1]


def test_the_last_position_is_always_computed_again() -> None:
    pool = BlockPool(4)
    names = chain(ROOT, range(16), 4)
    blocks = pool.take(4)
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, name)
    assert reusable(pool, names, 16, 4) == blocks[:3]
    assert reusable(pool, names, 17, 4) == blocks
    assert reusable(pool, names, 4, 4) == [] == reusable(pool, names, 0, 4)


def test_a_hole_ends_the_reusable_prefix_and_nothing_is_referenced() -> None:
    pool = BlockPool(4)
    names = chain(ROOT, range(16), 4)
    blocks = pool.take(4)
    for number in (0, 1, 3):
        pool.name(blocks[number], names[number])
    pool.give(blocks)
    assert reusable(pool, names, 16, 4) == blocks[:2]
    assert pool.ledger()["referenced"] == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_two_sequences_share_names_exactly_as_far_as_their_full_blocks_agree(
    one: list[int], two: list[int], size: int
) -> None:
    agree = 0
    while agree < min(len(one), len(two)) and one[agree] == two[agree]:
        agree += 1
    names = chain(ROOT, one, size), chain(ROOT, two, size)
    shared = sum(a == b for a, b in zip(*names, strict=False))
    assert shared == agree // size
    assert set(names[0][shared:]).isdisjoint(names[1][shared:])
