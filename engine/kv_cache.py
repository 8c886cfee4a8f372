"""The KV cache of one worker: one allocation in which a block id is one contiguous range holding all layers.

Shape [num_blocks, layers, 2, kv_heads, block_size, head_dim]; index 0 of the third dimension is K, 1 is V. Who may
read or write which block is not decided here: that is BlockPool, tickets and slots.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from engine.config import ModelConfig
from engine.kv_digest import kv_digest
from engine.messages import KvLayout
from engine.shared_memory import SharedMemory

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv_layout(config: ModelConfig, model_digest: bytes, dtype: str, block_size: int, numerics: str) -> KvLayout:
    """The layout of a model's blocks. `numerics` names what decides the bits: versions and the row tile."""
    return KvLayout(
        model_digest=model_digest,
        dtype=dtype,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_bytes=config.kv_block_values(block_size) * TORCH_DTYPES[dtype].itemsize,
        numerics=numerics,
    )


class KVCache:
    """Allocated once, zeroed; lives as long as the process, because other processes may hold handles to it."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: str = "cpu", memory: SharedMemory | None = None
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.data = _zeros(shape, TORCH_DTYPES[layout.dtype], device, memory)
        self.memory = memory  # other processes may read the blocks in it
        # A byte view over the same memory; numpy has no bfloat16, so the view is made on raw bytes.
        self._bytes = self.data.view(-1).view(torch.uint8).numpy().data if device == "cpu" else None

    def block_bytes(self, block: int, count: int = 1) -> memoryview:
        """The bytes of this block, or of `count` from it on: writable and not a copy. On the CPU only."""
        assert self._bytes is not None, f"block_bytes needs a cache on the CPU, this one is on {self.data.device}"
        assert 0 <= block <= self.num_blocks - count, f"{count} from block {block} are not in [0, {self.num_blocks})"
        size = self.layout.block_bytes
        return self._bytes[block * size : (block + count) * size]

    def write(self, block: int, offset: int, data: bytes | memoryview) -> None:
        self.block_bytes(block)[offset : offset + len(data)] = data

    def digest(self, block: int, position: int, tokens: Sequence[int]) -> int:
        """64 bits over the block's bytes, bound to its logical index and the tokens it holds."""
        return kv_digest(self.block_bytes(block), position, tokens)

    def zero(self, blocks: Sequence[int]) -> None:
        """Before a block changes tenant: the masked tail of a last block must never hold an Inf or a NaN."""
        if blocks:
            self.data[torch.tensor(blocks, device=self.data.device)] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str, shared: SharedMemory | None) -> torch.Tensor:
    """On the CPU the system's zero pages: a block takes memory, and the time to clear it, when it is first written."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if shared is not None:
        return torch.frombuffer(shared.map, dtype=dtype).view(shape)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
