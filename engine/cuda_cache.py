"""The KV cache of a worker on CUDA: an allocation seen as a tensor, and its blocks as bytes for transports.

Same shape as engine.kv_cache.KVCache. Bytes go over a stream of their own and are copies: reading and writing them wait
for that copy alone, not for the step that runs. Digests are computed on the card, where the bytes are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Gpu
from engine.batch import DigestRequest
from engine.cuda_copies import Copies, launch_sums, whole
from engine.kv_cache import TORCH_DTYPES
from engine.kv_digest import sum_digest
from engine.messages import KvLayout


class CudaKVCache:
    """Not zeroed at first: decode attention and prompts read no position that was not written.

    `memory` replaces the allocation of its own, which lives as long as a tensor over it.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, gpu: Gpu, memory: Tensor | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._gpu = gpu
        memory = gpu.pool(num_blocks * layout.block_bytes) if memory is None else memory
        self._raw = memory.view(num_blocks, layout.block_bytes)
        self.copies = Copies(gpu, self._raw, layout.block_bytes)
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.data = self._raw.view(-1).view(TORCH_DTYPES[layout.dtype]).view(shape)

    def on(self, gpu: Gpu) -> CudaKVCache:
        """The same blocks for another runner, whose stream zeroes and digests those that it fills."""
        other = copy.copy(self)
        other._gpu = gpu
        return other

    def block_bytes(self, block: int, count: int = 1) -> memoryview:
        """A copy of the bytes of this block, or of `count` from it on."""
        assert 0 <= block <= self.num_blocks - count, f"{count} from block {block} are not in [0, {self.num_blocks})"
        return self._raw[block : block + count].view(-1).cpu().numpy().data

    def write(self, block: int, offset: int, data: bytes | memoryview) -> None:
        """In place when it returns."""
        assert 0 <= block < self.num_blocks, f"block {block} is not in [0, {self.num_blocks})"
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._raw[block, offset : offset + len(data)].copy_(source)

    def digest(self, block: int, position: int, tokens: Sequence[int]) -> int:
        """64 bits over the block's bytes, bound to its logical index and the tokens it holds."""
        return sum_digest(self.copies.sums([block])[0], position, tokens)

    def launch_digests(self, asked: Sequence[DigestRequest]) -> Tensor | None:
        """On our stream, after what writes the blocks. What it returns is on the host once that is done."""
        if not asked:
            return None
        ids = [ask.block for ask in asked]
        gpu = self._gpu
        return gpu.to_host(launch_sums(gpu, self._raw, self.layout.block_bytes, ids))

    def digests(self, asked: Sequence[DigestRequest], launched: Tensor | None) -> list[int]:
        """What `launch_digests` returned, read."""
        sums = [] if launched is None else whole(launched)
        return [sum_digest(total, ask.position, ask.tokens) for ask, total in zip(asked, sums, strict=True)]

    def export(self) -> bytes:
        """A handle of the pool for other processes of this host."""
        return self._gpu.export(self._raw)

    def open(self, handle: bytes) -> int:
        """Another process's pool, by its handle: an address for `copies`. Raises CudaError."""
        return self._gpu.open(handle)

    def room(self, address: int) -> int | None:
        """How many blocks the memory holds that `open` returned; None where the driver cannot tell."""
        size = self._gpu.size(address)
        return None if size is None else size // self.layout.block_bytes

    def close(self, address: int) -> None:
        self._gpu.close(address)

    def zero(self, blocks: Sequence[int]) -> None:
        """On our stream, before whatever is launched next."""
        for first in range(0, len(blocks), 65535):
            ids = self._gpu.to_device(blocks[first : first + 65535])
            self._gpu.launch(launches.zero_blocks(self.layout.block_bytes, len(ids)), self._raw, ids, overlap=False)
