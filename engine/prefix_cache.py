"""Names for full KV blocks, and the longest prefix that a pool still has.

A block's name is a SHA-256 over its parent's name and its own token ids; the chain's root covers everything
else that decides the bytes or who may see them. The layout is fixed: every process and every version of
Python gets the same names. This file never references a block: whoever counts on one shares it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

from engine.blocks import BlockPool

_VERSION = b"pagewire-kv-1"


@lru_cache(maxsize=256)
def root_digest(namespace: bytes, model_digest: bytes, lora_id: str, dtype: str, block_size: int) -> bytes:
    """The parent of a sequence's first block. Fields carry their lengths, so that no two roots share bytes."""
    digest = hashlib.sha256(_VERSION)
    for part in (namespace, model_digest, lora_id.encode(), dtype.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    digest.update(struct.pack("<I", block_size))
    return digest.digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: parent digest, then the token ids as little-endian uint32."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def chain(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The names of the full blocks of a sequence, in order; a partial last block has none."""
    tokens = len(token_ids) // block_size * block_size
    packed = struct.pack(f"<{tokens}I", *token_ids[:tokens])  # all of them at once, as block_digest packs a block's
    names, parent = [], root
    for start in range(0, len(packed), 4 * block_size):
        parent = hashlib.sha256(parent + packed[start : start + 4 * block_size]).digest()
        names.append(parent)
    return names


def last_name(pool: BlockPool, blocks: Sequence[int], root: bytes, token_ids: Sequence[int], block_size: int) -> bytes:
    """The name of the last full block of a sequence, from the last of its blocks that has one in `pool`, or the root:
    a block has none whose name another one keeps."""
    full, known = len(token_ids) // block_size, None
    while full and (known := pool.name_of(blocks[full - 1])) is None:
        full -= 1
    known = known or root
    return [known, *chain(known, token_ids[full * block_size :], block_size)][-1]


def reusable(pool: BlockPool, hashes: Sequence[bytes], num_tokens: int, block_size: int) -> list[int]:
    """The blocks of the longest prefix that `pool` has, not yet referenced: share() each before the next take().

    At most (num_tokens - 1) // block_size of them, so that computing the last position again never writes
    into a sealed block.
    """
    return pool.find_all(hashes[: max(0, num_tokens - 1) // block_size])
