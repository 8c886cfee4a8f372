"""Blocks out of another pool and digests of our own, on a card, beside the steps that run there.

Own stream, of the lowest priority, and a part of the card's multiprocessors: what is copied here never delays a step by
more than the memory's bandwidth that it takes. One kernel copies any number of blocks between two lists of ids and
sums up what it copies, so that the bytes are read once. Any thread may call it, and sleeps until its own work is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Address, Gpu

CTAS = 64  # thread blocks of a copy: they fill a quarter of an H200's multiprocessors


class Copies:
    """Into `pool`, whose blocks have `block_bytes` bytes each."""

    def __init__(self, gpu: Gpu, pool: Tensor, block_bytes: int, ctas: int = CTAS) -> None:
        self._gpu = gpu.beside()
        self._pool = pool
        self._block_bytes = block_bytes
        self.ctas = ctas

    def copy(self, source: int, from_ids: Sequence[int], to_ids: Sequence[int]) -> list[int]:
        """From the pool at address `source`, which this card reaches. Returns once all of it is in place: the sums of
        the bytes that were copied, as engine.kv_digest.block_sum."""
        gpu, count = self._gpu, len(to_ids)
        with gpu.on_stream():
            to, origin, sums = _lists(gpu, to_ids, from_ids)
            launch = launches.copy_and_digest(self._block_bytes, count, self.ctas)
            gpu.launch(launch, self._pool, Address(source), to, origin, sums, count, overlap=False)
            return _read(gpu, sums)

    def sums(self, ids: Sequence[int]) -> list[int]:
        """Of blocks that no step writes."""
        with self._gpu.on_stream():
            return _read(self._gpu, launch_sums(self._gpu, self._pool, self._block_bytes, ids, self.ctas))


def launch_sums(gpu: Gpu, pool: Tensor, block_bytes: int, ids: Sequence[int], ctas: int) -> Tensor:
    """On the stream of `gpu`, after what was launched there: int32 pairs, the halves of each block's sum."""
    listed, sums = _lists(gpu, ids)
    gpu.launch(launches.digest_blocks(block_bytes, len(ids), ctas), pool, listed, sums, len(ids), overlap=False)
    return sums


def whole(sums: Tensor) -> list[int]:
    """What `launch_sums` returned, once it is on the host."""
    return [int(total) & 0xFFFFFFFFFFFFFFFF for total in sums.view(torch.int64).tolist()]


def _lists(gpu: Gpu, *lists: Sequence[int]) -> Sequence[Tensor]:
    """Lists of one length, padded to an even number of ids, and zeroed sums behind them: one copy brings them all."""
    count = len(lists[0])
    even = count + count % 2  # sums are 64 bits wide
    packed = [value for ids in lists for value in (*ids, *[0] * (even - count))]
    on_card = gpu.to_device([*packed, *[0] * (2 * count)])
    return on_card.split([*[even] * len(lists), 2 * count])


def _read(gpu: Gpu, sums: Tensor) -> list[int]:
    held = gpu.to_host(sums)
    gpu.mark(sleeping=True).synchronize()
    return whole(held)
