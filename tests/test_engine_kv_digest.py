"""The digest of blocks on a card: what its sum notices, and that an emulated card's cache keeps it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from emulated_gpu import EmulatedGpu

from engine.batch import DigestRequest
from engine.cuda_cache import CudaKVCache
from engine.kv_digest import GOLDEN, block_sum, sum_digest
from engine.messages import KvLayout

LAYOUT = KvLayout(b"m", "float32", 16, 2, 2, 8, 4096, "")


def cache(blocks: int) -> CudaKVCache:
    gpu: Any = EmulatedGpu()
    made = CudaKVCache(LAYOUT, blocks, gpu)
    for block in range(blocks):
        made.write(block, 0, random.Random(block).randbytes(LAYOUT.block_bytes))
    return made


def test_a_sum_is_what_its_definition_says() -> None:
    words = [3, 2**64 - 1, 0]
    total = 0
    for i, word in enumerate(words):
        mixed = word ^ ((i + 1) * GOLDEN % 2**64)
        total += (mixed % 2**32) * (mixed >> 32) + word
    data = b"".join(word.to_bytes(8, "little") for word in words)
    assert block_sum(data) == total % 2**64


@pytest.mark.parametrize("seed", range(20))
def test_any_flipped_bit_and_any_two_words_that_change_places_are_noticed(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(rng.randbytes(4096))
    before = block_sum(bytes(data))
    at = rng.randrange(4096)
    data[at] ^= 1 << rng.randrange(8)
    flipped = block_sum(bytes(data))
    assert flipped != before
    i, j = sorted(rng.sample(range(512), 2))
    first, second = bytes(data[8 * i : 8 * i + 8]), bytes(data[8 * j : 8 * j + 8])
    data[8 * i : 8 * i + 8], data[8 * j : 8 * j + 8] = second, first
    assert block_sum(bytes(data)) != flipped


def test_a_digest_is_bound_to_position_and_tokens() -> None:
    digests = {sum_digest(5, position, tokens) for position in (0, 1) for tokens in ([1, 2], [2, 1], [1])}
    assert len(digests) == 6


@pytest.mark.parametrize("count", [1, 2, 3])
def test_digests_of_a_step_are_those_of_single_blocks(count: int) -> None:
    held = cache(4)
    asked = [DigestRequest(block, block + 7, [1, 2, block]) for block in range(1, 1 + count)]
    found = held.digests(asked, held.launch_digests(asked))
    assert found == [held.digest(ask.block, ask.position, ask.tokens) for ask in asked]
    assert held.launch_digests([]) is None and held.digests([], None) == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_copied_blocks_have_the_sums_that_their_owner_knows(count: int) -> None:
    owner, puller = cache(5), cache(3)
    sources, targets = [4, 0, 2][:count], [1, 2, 0][:count]
    address = puller.open(owner.export())
    sums = puller.copies.copy(address, sources, targets)
    puller.close(address)
    assert sums == owner.copies.sums(sources) == puller.copies.sums(targets)
    for source, target in zip(sources, targets, strict=True):
        assert puller.block_bytes(target) == owner.block_bytes(source)
