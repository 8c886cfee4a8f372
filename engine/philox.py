"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3" (SC 2011): a bijection of a 128-bit counter under a 64-bit key, with no state to carry.

Token n of a request with seed s draws from counter n under key s, so a request that moves to another worker, or
shares its batch with others, goes on with the same draws. Plain integers; the CUDA sampler computes the same.
"""

from __future__ import annotations

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words; all words are 32 bits, least significant first."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low = _MULTIPLIER_0 * x0
        high = _MULTIPLIER_1 * x2
        x0, x1, x2, x3 = (high >> 32) ^ x1 ^ k0, high & _WORD, (low >> 32) ^ x3 ^ k1, low & _WORD
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return x0, x1, x2, x3


def uniform(seed: int, index: int) -> float:
    """In [0, 1), 53 bits, for token `index` of the request seeded with `seed`, which has 64 bits."""
    words = philox4x32((index & _WORD, index >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53
