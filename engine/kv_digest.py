"""The digest that ties a KV block's bytes to the tokens and the position they stand for.

Owner and puller compute it on their own bytes, so a block that is intact but is another sequence's, or sits at
another position, does not pass. It detects mistakes, not attackers. On the CPU it is xxh3 over the bytes; on a card a
sum in any order, which csrc/blocks.cu computes while it copies and `block_sum` specifies. Only workers of one layout
compare digests, and a layout says where its blocks are. numpy and xxhash, no torch.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence

import numpy as np
import xxhash

GOLDEN = 0x9E3779B97F4A7C15
_LOW = np.uint64(0xFFFFFFFF)


def kv_digest(data: memoryview | bytes, position: int, tokens: Sequence[int]) -> int:
    """64 bits over the block's raw bytes, seeded by its logical index and the tokens it holds."""
    return xxhash.xxh3_64_intdigest(data, seed=_seed(position, tokens))


def sum_digest(block_sum: int, position: int, tokens: Sequence[int]) -> int:
    """64 bits of a block whose bytes are known by their sum."""
    return xxhash.xxh64_intdigest(block_sum.to_bytes(8, "little"), seed=_seed(position, tokens))


def block_sum(data: memoryview | bytes) -> int:
    """Over 64-bit words w[i], with k[i] = (i + 1) * GOLDEN and x = w[i] ^ k[i]: the sum of low32(x) * high32(x) + w[i]
    modulo 2^64. A word in another place, or another word, changes it."""
    words = np.frombuffer(data, dtype="<u8")
    mixed = words ^ (np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(GOLDEN))
    return int(((mixed & _LOW) * (mixed >> np.uint64(32)) + words).sum(dtype=np.uint64))


def _seed(position: int, tokens: Sequence[int]) -> int:
    words = array.array("I", (position, *tokens))
    if sys.byteorder == "big":
        words.byteswap()
    return xxhash.xxh64_intdigest(words.tobytes())
