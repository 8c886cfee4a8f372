"""What makes a ticket good: ids, the layout that both workers must share, and checks on what a router passes on.

Pure functions over engine.messages. The words for the user are elsewhere (wire.errors); `mismatch` alone names
both sides' values, because whoever starts two workers that differ has to see in what.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Container

from engine.blocks import num_blocks_for
from engine.messages import KvLayout, Ticket

MAX_CONSUMERS = 16


def layout_digest(layout: KvLayout) -> bytes:
    """SHA-256 over every field, each with its length: two workers may exchange KV only if it agrees."""
    digest = hashlib.sha256(b"pagewire-layout-1")
    for value in layout:
        part = value if isinstance(value, bytes) else str(value).encode()
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


def mismatch(ours: KvLayout, theirs: KvLayout) -> list[str]:
    """One sentence per field that differs; empty if KV may be exchanged."""
    return [
        f"{name} is {_show(mine)} here and {_show(other)} there"
        for name, mine, other in zip(KvLayout._fields, ours, theirs, strict=True)
        if mine != other
    ]


def _show(value: object) -> str:
    return value.hex()[:16] or "empty" if isinstance(value, bytes) else str(value)


def mint(rng: random.Random, taken: Container[int]) -> int:
    """A ticket id that the owner does not use. Nobody can guess one, nor meet one of an earlier process."""
    while True:
        ticket_id = rng.getrandbits(64)
        if ticket_id and ticket_id not in taken:
            return ticket_id


def fault(ticket: Ticket, num_tokens: int, block_size: int) -> str | None:
    """What is wrong with a ticket for a sequence of `num_tokens` tokens, in one sentence; None if nothing is."""
    if ticket.num_tokens != num_tokens:
        return f"the ticket covers {ticket.num_tokens} tokens and the request has {num_tokens}"
    expected = num_blocks_for(num_tokens, block_size)
    if ticket.num_blocks != expected:
        return f"the ticket has {ticket.num_blocks} blocks and {num_tokens} tokens need {expected}"
    if len(ticket.block_hashes) > num_tokens // block_size:
        return f"the ticket names {len(ticket.block_hashes)} full blocks and the request has {num_tokens // block_size}"
    if not 1 <= ticket.consumers <= MAX_CONSUMERS:
        return f"the ticket has {ticket.consumers} consumers and may have 1 to {MAX_CONSUMERS}"
    if not ticket.owner.address:
        return "the ticket does not say where its owner is"
    return None
