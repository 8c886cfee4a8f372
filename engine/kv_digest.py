"""The digest that ties a KV block's bytes to the tokens and the position they stand for.

Owner and puller compute it on their own bytes, so a block that is intact but is another sequence's, or sits at
another position, does not pass. It detects mistakes, not attackers. Standard library and xxhash, no torch.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence

import xxhash


def kv_digest(data: memoryview | bytes, position: int, tokens: Sequence[int]) -> int:
    """64 bits over the block's raw bytes, seeded by its logical index and the tokens it holds."""
    words = array.array("I", (position, *tokens))
    if sys.byteorder == "big":
        words.byteswap()
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh64_intdigest(words.tobytes()))
