"""The Llama family on CUDA: the same weights as engine.models.llama, in two orders of operations.

`prompts` computes packed chunks of prompts: large products by cuBLAS, attention by torch's kernels over each sequence.
`decode` launches one step of a batch, as engine.models.cuda_decode has it. Both write K and V to blocks first. Owns the
angles of rotation; never the state, the cache or the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.backend import launches
from engine.backend.cuda import Gpu, Long
from engine.backend.launches import Heads
from engine.messages import KvLayout
from engine.models.cuda_decode import DecodeSteps, Places
from engine.models.cuda_products import add_linear, linear
from engine.models.llama import Llama

# In the order in which they are tried; the last two take what the others refuse, such as float32.
_SDPA = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_REGULAR = 128  # tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` sequences side by side, from token `first`, each with `tokens` new ones; `start` is 0 if count > 1.

    `blocks` are those that hold positions 0 to start + tokens, on the card; unused where start is 0.
    """

    first: int
    count: int
    tokens: int
    start: int
    blocks: Tensor | None


class CudaLlama:
    """`pool` is the KV cache's tensor. At most `max_rows` rows are decoded at a time."""

    def __init__(self, weights: Llama, layout: KvLayout, gpu: Gpu, max_rows: int, max_positions: int) -> None:
        # Here, because torch's compiler comes with it: seconds and a folder in TMPDIR, even where no card is.
        from torch.nn.attention.bias import causal_lower_right

        config = weights.config
        self._lower_right = causal_lower_right
        self.weights = weights
        self.config = config
        self.layout = layout
        self.max_rows = max_rows
        self.dtype = layout.dtype
        self._gpu = gpu
        self._q = config.num_heads * config.head_dim
        self._qkv = self._q + 2 * config.num_kv_heads * config.head_dim
        self._heads = Heads(
            config.num_heads, config.num_kv_heads, config.head_dim, layout.block_size, config.num_layers
        )
        frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self._rotation = torch.polar(torch.ones_like(angles), angles).to(gpu.device)
        self._steps = steps = DecodeSteps(weights, layout, self._heads, gpu, max_rows, self._rope)
        self.decode, self.kernels = steps.decode, steps.kernels

    # ---- prompts --------------------------------------------------------------------------------------------------

    def prompts(self, token_ids: Tensor, places: Places, pieces: Sequence[Piece], pool: Tensor) -> Tensor:
        """Hidden states [tokens, hidden] before the last norm; writes K and V of all tokens into the pool."""
        config, count = self.config, token_ids.shape[0]
        x = F.embedding(token_ids, self.weights.embed)
        attended = torch.empty(count, self._q, dtype=x.dtype, device=x.device)
        norm = launches.rms_norm(config.hidden_size, count, self.dtype)
        rope = launches.rope_write(self._heads, count, self.dtype)
        silu = launches.silu_mul(config.intermediate_size, count, self.dtype)
        h, inner = torch.empty_like(x), x.new_empty(count, config.intermediate_size)
        with sdpa_kernel(_sdpa(pieces), set_priority=True):
            for index, layer in enumerate(self.weights.layers):
                self._gpu.launch(norm, x, None, layer.attention_norm, h, config.rms_norm_eps)
                qkv = linear(h, layer.qkv, layer.qkv_bias)
                self._gpu.launch(rope, qkv, count, self._rope(places, pool, index))
                for piece in pieces:
                    self._attend(qkv, attended, piece, pool, index)
                add_linear(x, attended, layer.out, layer.out_bias)
                self._gpu.launch(norm, x, None, layer.mlp_norm, h, config.rms_norm_eps)
                gate_up = linear(h, layer.gate_up, layer.gate_up_bias)
                self._gpu.launch(silu, gate_up, inner, count)
                add_linear(x, inner, layer.down, layer.down_bias)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary], float32."""
        out, config = torch.empty_like(hidden), self.config
        norm = launches.rms_norm(config.hidden_size, hidden.shape[0], self.dtype)
        self._gpu.launch(norm, hidden, None, self.weights.norm, out, config.rms_norm_eps)
        return (out @ self.weights.head).float()

    def _attend(self, qkv: Tensor, out: Tensor, piece: Piece, pool: Tensor, layer: int) -> None:
        config, last = self.config, piece.first + piece.count * piece.tokens
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = qkv[piece.first : last].view(piece.count, piece.tokens, heads + 2 * kv_heads, dim).transpose(1, 2)
        q = rows[:, :heads]
        end = piece.start + piece.tokens
        if piece.blocks is None:
            k, v = rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
        else:
            gathered = self._gathered(piece.blocks, pool, layer)
            k, v = gathered[:, :, :, :end].unbind(0)
        window = config.sliding_window
        mask: Tensor | None = None
        if piece.tokens > 1 and (window is not None and end > window or q.dtype == torch.float32 and piece.start):
            mask = _visible(piece.start, end, window, q.device)
        elif piece.tokens == 1 and window is not None and end > window:
            k, v = k[:, :, -window:], v[:, :, -window:]
        elif piece.start and piece.tokens > 1:
            mask = self._lower_right(piece.tokens, end)
        causal = piece.start == 0 and mask is None and piece.tokens > 1
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=heads != kv_heads)
        out[piece.first : last].view(piece.count, piece.tokens, heads, dim).copy_(found.transpose(1, 2))

    def _gathered(self, blocks: Tensor, pool: Tensor, layer: int) -> Tensor:
        """[2, 1, kv_heads, positions, head_dim]"""
        heads, count = self._heads, len(blocks)
        out = pool.new_empty(2, 1, heads.kv_heads, count * heads.block_size, heads.head_dim)
        stride = Long(pool.stride(0) * pool.element_size())
        self._gpu.launch(launches.gather_tiles(heads, count, self.dtype), out, pool[0, layer], blocks, stride)
        return out

    def _rope(self, places: Places, pool: Tensor, layer: int) -> bytes:
        rows = 0 if places.table_rows is None else places.table_rows.data_ptr()
        return launches.ROPE_ARGS.pack(
            self._rotation.data_ptr(), places.positions.data_ptr(), places.tables.data_ptr(), rows, pool.data_ptr(),
            places.tables.stride(0), layer,
        )  # fmt: skip


def _sdpa(pieces: Sequence[Piece]) -> list[SDPBackend]:
    """cuDNN is the fastest, but makes a plan for each shape that it has not met, for 70 ms: only for regular ones."""
    regular = all(piece.start or piece.tokens % _REGULAR == 0 for piece in pieces)
    return _SDPA if regular else _SDPA[1:]


def _visible(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[end - start, end] bool: causal, and within the sliding window if there is one."""
    query, key = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
