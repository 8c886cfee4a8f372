"""Blocks out of another pool and digests of our own, on a card, beside the steps that run there.

Own stream, of the lowest priority, and a part of the card's multiprocessors: what is copied here never delays a step by
more than the memory's bandwidth that it takes. One kernel copies any number of blocks between two lists of ids and
sums up what it copies, so that the bytes are read once. Any thread may call it, and sleeps until its own work is done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Address, Gpu

CTAS = 132  # thread blocks of a copy: on an H200 one for each multiprocessor, of which it takes half the registers
MOST = 4096  # blocks of one launch


class Copies:
    """Into `pool`, whose blocks have `block_bytes` bytes each. One copy at a time, whoever asks: all of them together
    have this part of the card."""

    def __init__(self, gpu: Gpu, pool: Tensor, block_bytes: int, ctas: int = CTAS) -> None:
        self._gpu = gpu.beside()
        self._pool = pool
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        # Two lists of ids and, behind them, sums of 64 bits each: on the host, where they are zero, and on the card.
        self._lists = gpu.pinned(4 * MOST)
        self._found = gpu.pinned(2 * MOST)
        self._on_card = torch.zeros(4 * MOST, dtype=torch.int32, device=gpu.device)
        self._gpu.catch_up()
        self.ctas = ctas

    def copy(self, source: int, from_ids: Sequence[int], to_ids: Sequence[int]) -> list[int]:
        """From the pool at address `source`, which this card reaches. Returns once all of it is in place: the sums of
        the bytes that were copied, as engine.kv_digest.block_sum."""
        found: list[int] = []
        for first in range(0, len(to_ids), MOST):
            found += self._sums(to_ids[first : first + MOST], from_ids[first : first + MOST], source)
        return found

    def sums(self, ids: Sequence[int]) -> list[int]:
        """Of blocks that no step writes."""
        found: list[int] = []
        for first in range(0, len(ids), MOST):
            found += self._sums(ids[first : first + MOST])
        return found

    def _sums(self, to_ids: Sequence[int], from_ids: Sequence[int] | None = None, source: int = 0) -> list[int]:
        gpu, count, size = self._gpu, len(to_ids), self._block_bytes
        with self._lock, gpu.on_stream():
            lists, on_card = self._lists[: 4 * count], self._on_card[: 4 * count]
            numbers = lists.numpy()
            numbers[:count], numbers[2 * count :] = to_ids, 0
            numbers[count : 2 * count] = to_ids if from_ids is None else from_ids
            on_card.copy_(lists, non_blocking=True)
            to, origin, sums = on_card.split([count, count, 2 * count])
            if from_ids is None:
                launch = launches.digest_blocks(size, count, self.ctas)
                gpu.launch(launch, self._pool, to, sums, count, overlap=False)
            else:
                launch = launches.copy_and_digest(size, count, self.ctas)
                gpu.launch(launch, self._pool, Address(source), to, origin, sums, count, overlap=False)
            found = self._found[: 2 * count]
            found.copy_(sums, non_blocking=True)
            gpu.mark(sleeping=True).synchronize()
            return whole(found)


def launch_sums(gpu: Gpu, pool: Tensor, block_bytes: int, ids: Sequence[int]) -> Tensor:
    """On the stream of `gpu`, after what was launched there: int32 pairs, the halves of each block's sum."""
    count = len(ids)
    even = count + count % 2  # sums are 64 bits wide
    on_card = gpu.to_device([*ids, *[0] * (even - count + 2 * count)])
    listed, sums = on_card.split([even, 2 * count])
    launch = launches.digest_blocks(block_bytes, count, 2 * gpu.multiprocessors)
    gpu.launch(launch, pool, listed, sums, count, overlap=False)
    return sums


def whole(sums: Tensor) -> list[int]:
    """What `launch_sums` returned, once it is on the host."""
    return [int(total) & 0xFFFFFFFFFFFFFFFF for total in sums.view(torch.int64).tolist()]
