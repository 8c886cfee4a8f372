"""Layouts are compared field by field, and a ticket that cannot be right is refused with its numbers."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.messages import KvLayout, Node, Ticket
from kvtransfer.ticket import fault, layout_digest, mint, mismatch

LAYOUT = KvLayout(b"\x01" * 32, "float32", 16, 2, 4, 64, 65536, "torch 2.13 tile 16")
TICKET = Ticket(9, Node("prefill-0", 77, "host:1"), 33, 3, 60.0, block_hashes=(b"a", b"b"))


@pytest.mark.parametrize("field", KvLayout._fields)
def test_every_field_of_a_layout_counts(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = LAYOUT._replace(
        **{field: value + (b"x" if isinstance(value, bytes) else "x" if isinstance(value, str) else 1)}
    )
    assert layout_digest(other) != layout_digest(LAYOUT) == layout_digest(LAYOUT._replace())
    assert [sentence.split()[0] for sentence in mismatch(LAYOUT, other)] == [field]


def test_a_mismatch_names_both_values() -> None:
    other = LAYOUT._replace(block_size=32, model_digest=b"")
    assert mismatch(LAYOUT, LAYOUT) == []
    assert mismatch(LAYOUT, other) == [
        "model_digest is 0101010101010101 here and empty there",
        "block_size is 16 here and 32 there",
    ]


def test_ids_are_never_taken_nor_zero() -> None:
    class Rng(random.Random):
        def __init__(self) -> None:
            self.values = [0, 5, 6]

        def getrandbits(self, k: int, /) -> int:
            return self.values.pop(0)

    assert mint(Rng(), {5}) == 6


def test_a_good_ticket_has_no_fault() -> None:
    assert fault(TICKET, 33, 16) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_tokens": 34}, "the ticket covers 34 tokens and the request has 33"),
        ({"num_blocks": 2}, "the ticket has 2 blocks and 33 tokens need 3"),
        ({"block_hashes": (b"a",) * 3}, "the ticket names 3 full blocks and the request has 2"),
        ({"consumers": 17}, "the ticket has 17 consumers and may have 1 to 16"),
        ({"owner": Node("prefill-0", 77, "")}, "the ticket does not say where its owner is"),
    ],
)
def test_a_ticket_that_cannot_be_right_says_why(change: dict[str, object], sentence: str) -> None:
    assert fault(dataclasses.replace(TICKET, **change), 33, 16) == sentence
