"""A block is one contiguous range of bytes, and its digest is bound to where and for what it is used."""

from __future__ import annotations

import pytest
import torch

from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import KVCache, kv_layout

CONFIG = ModelConfig("LlamaForCausalLM", 100, 64, 128, 3, 4, 2, 16, 1e-5, 512, RopeConfig())


def make_cache(dtype: str = "float32", num_blocks: int = 4) -> KVCache:
    return KVCache(kv_layout(CONFIG, b"model", dtype, 16, "test"), num_blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_is_one_contiguous_range_holding_all_layers(dtype: str) -> None:
    cache = make_cache(dtype)
    assert cache.data.shape == (4, 3, 2, 2, 16, 16)
    assert cache.layout.block_bytes == 3 * 2 * 2 * 16 * 16 * cache.data.itemsize
    block = cache.block_bytes(2)
    assert len(block) == cache.layout.block_bytes
    block[:] = b"\x3c" * len(block)
    touched = (cache.data != 0).flatten(1).any(1)
    assert touched.tolist() == [False, False, True, False]
    assert (cache.data[2] != 0).all()


def test_block_bytes_are_the_tensor_not_a_copy_of_it() -> None:
    cache = make_cache()
    cache.data[1, 0, 0, 0, 0, 0] = 1.5
    assert bytes(cache.block_bytes(1)[:4]) == torch.tensor([1.5]).numpy().tobytes()
    cache.block_bytes(3)[:] = cache.block_bytes(1)
    assert cache.data[3, 0, 0, 0, 0, 0] == 1.5


def test_zero_clears_those_blocks_and_no_others() -> None:
    cache = make_cache()
    cache.data.fill_(float("nan"))
    cache.zero([0, 3])
    assert cache.data.isnan().flatten(1).any(1).tolist() == [False, True, True, False]
    cache.zero([])


def test_a_digest_depends_on_bytes_position_and_tokens() -> None:
    cache = make_cache()
    first = cache.digest(0, 0, [1, 2, 3])
    assert first == cache.digest(1, 0, [1, 2, 3])
    assert 0 <= first < 2**64
    others = {cache.digest(0, 1, [1, 2, 3]), cache.digest(0, 0, [1, 2, 4]), cache.digest(0, 0, [1, 2])}
    cache.data[0, 2, 1, 1, 15, 15] = 1
    others.add(cache.digest(0, 0, [1, 2, 3]))
    assert len(others) == 4
    assert first not in others


def test_a_block_outside_the_pool_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="block 4"):
        make_cache().block_bytes(4)
