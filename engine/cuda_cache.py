"""The KV cache of a worker on CUDA: PyCUDA's allocation seen as a tensor, and its blocks as bytes for transports.

Same shape as engine.kv_cache.KVCache. Bytes go over a stream of their own and are copies: reading and writing them wait
for that copy alone, not for the step that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Gpu
from engine.kv_cache import TORCH_DTYPES
from engine.kv_digest import kv_digest
from engine.messages import KvLayout


class CudaKVCache:
    """Not zeroed at first: decode attention and prompts read no position that was not written.

    `memory` replaces the allocation of its own, which lives as long as the process.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, gpu: Gpu, memory: Tensor | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._gpu = gpu
        memory = gpu.pool(num_blocks * layout.block_bytes) if memory is None else memory
        self._raw = memory.view(num_blocks, layout.block_bytes)
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.data = self._raw.view(-1).view(TORCH_DTYPES[layout.dtype]).view(shape)

    def block_bytes(self, block: int) -> memoryview:
        """A copy of the block's bytes."""
        assert 0 <= block < self.num_blocks, f"block {block} is not in [0, {self.num_blocks})"
        return self._raw[block].cpu().numpy().data

    def write(self, block: int, offset: int, data: bytes) -> None:
        """In place when it returns."""
        assert 0 <= block < self.num_blocks, f"block {block} is not in [0, {self.num_blocks})"
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._raw[block, offset : offset + len(data)].copy_(source)

    def digest(self, block: int, position: int, tokens: Sequence[int]) -> int:
        """64 bits over the block's bytes, bound to its logical index and the tokens it holds."""
        return kv_digest(self.block_bytes(block), position, tokens)

    def zero(self, blocks: Sequence[int]) -> None:
        """On our stream, before whatever is launched next."""
        for first in range(0, len(blocks), 65535):
            ids = self._gpu.to_device(blocks[first : first + 65535])
            self._gpu.launch(launches.zero_blocks(self.layout.block_bytes, len(ids)), self._raw, ids, overlap=False)
