"""Which decode batches run as two halves side by side, each on a stream of its own, and what each half may take.

One half attends, which is a matter of the memory alone, beside the other's products, which for a small model are a
matter of latency alone. Plain values, like those of engine.backend.launches.
"""

from __future__ import annotations

from dataclasses import replace

from engine.backend.launches import Launch

ROWS = range(192, 513)  # of a batch: on an H200 a 135M shape is 8 to 11% faster at 192 and 256 rows, 10% slower at 128
_NARROW = 2048  # of a hidden size: below it the bytes of a layer's weights are nothing beside the KV of so many rows
_REST = 4096  # bytes that the driver, the barriers and the alignment of two blocks take


def lane(hidden: int, attention: Launch, ctas: int, shared_per_multiprocessor: int) -> tuple[Launch, int] | None:
    """The attention of one half, and the bytes of shared memory that it leaves to the other's products; None for a
    model that is not narrow, or whose attention has several blocks (`ctas`) on a multiprocessor.

    It takes so much that the halves' attentions do not run at the same time, when both would last twice as long."""
    if hidden >= _NARROW or ctas != 1:
        return None
    shared = max(attention.shared, shared_per_multiprocessor // 2 + 1024)
    return replace(attention, shared=shared), shared_per_multiprocessor - shared - _REST


def halves(rows: int) -> list[tuple[int, int]]:
    """First row of each half and the one behind its last."""
    return [(0, rows // 2), (rows // 2, rows)]
