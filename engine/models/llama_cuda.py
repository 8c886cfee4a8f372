"""The Llama family on CUDA: the same weights as engine.models.llama, in two orders of operations.

`prompts` computes packed chunks of prompts: large products by cuBLAS, attention by torch's kernels over each sequence.
`decode` launches one step of a batch whose state lives on the card; it reads nothing from the host, so that a graph may
record it. Both write K and V to blocks first. Owns the workspaces of decode; never the state, the cache or the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.backend import attention, launches
from engine.backend.cuda import Gpu, Long
from engine.backend.launches import Heads, Launch
from engine.backend.products import Ending
from engine.kv_cache import TORCH_DTYPES
from engine.messages import KvLayout
from engine.models.cuda_products import Products, fold_norms
from engine.models.llama import Llama, LlamaLayer

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


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens sit: int32 tensors on the card, as ROPE_ARGS has them."""

    positions: Tensor  # [tokens]
    tables: Tensor  # [rows, width]
    table_rows: Tensor | None  # [tokens]; None: each its own


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    tokens: Tensor  # int32 [rows]
    lengths: Tensor  # int32 [rows]
    places: Places


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
        shape = attention.AttentionShape(
            layout.dtype, config.head_dim, config.num_heads // config.num_kv_heads, layout.block_size,
            window=config.sliding_window or 0,
        )  # fmt: skip
        geometry = attention.geometry(shape, gpu.shared_per_multiprocessor)
        self._planner, self._attention = _attention_launches(shape, geometry, gpu.multiprocessors)
        grid = self._attention.grid[0]
        frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self._rotation = torch.polar(torch.ones_like(angles), angles).to(gpu.device)

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=gpu.device)

        def values(width: int) -> Tensor:
            return torch.zeros(max_rows, width, dtype=TORCH_DTYPES[layout.dtype], device=gpu.device)

        self._plan = ints(attention.plan_words(shape, config.num_kv_heads, grid, max_rows))
        self._partials = torch.zeros(2 * grid * shape.partial, dtype=torch.float32, device=gpu.device)
        hidden, inner = config.hidden_size, config.intermediate_size
        self._x, self._h, self._qkv_out, self._attended = map(values, (hidden, hidden, self._qkv, self._q))
        self._gate_up, self._inner = values(2 * inner), values(inner)
        read = (self._x, self._h, self._attended, self._inner)
        self._products = Products(gpu, layout.dtype, self._heads, config.rms_norm_eps, read)
        if gpu.clusters and layout.dtype != "float32":
            fold_norms(weights)
        self._logits = torch.zeros(max_rows, config.vocab_size, dtype=torch.float32, device=gpu.device)

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
                qkv = _linear(h, layer.qkv, layer.qkv_bias)
                self._gpu.launch(rope, qkv, count, self._rope(places, pool, index))
                for piece in pieces:
                    self._attend(qkv, attended, piece, pool, index)
                _add_linear(x, attended, layer.out, layer.out_bias)
                self._gpu.launch(norm, x, None, layer.mlp_norm, h, config.rms_norm_eps)
                gate_up = _linear(h, layer.gate_up, layer.gate_up_bias)
                self._gpu.launch(silu, gate_up, inner, count)
                _add_linear(x, inner, layer.down, layer.down_bias)
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

    # ---- decode ---------------------------------------------------------------------------------------------------

    def decode(self, inputs: DecodeInputs, rows: int, pool: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of the first `rows` rows, float32 or of the element type; overwritten next time."""
        config, weights, places, launch = self.config, self.weights, inputs.places, self._gpu.launch
        x = self._x[:rows]
        width = places.tables.stride(0)
        plan = Launch(self._planner.kernel, "plan_attention", (1, 1), self._planner.block, attention.plan_shared(rows))
        launch(plan, inputs.lengths, places.tables, self._plan, rows, width, config.num_kv_heads,
               self._attention.grid[0])  # fmt: skip
        launch(launches.embed(config.hidden_size, rows, self.dtype), weights.embed, inputs.tokens, x)
        for index, layer in enumerate(weights.layers):
            self._qkv_step(x, layer, rows, self._rope(places, pool, index))
            launch(self._attention, self._qkv_out, pool[0, index], self._attended, places.tables, self._plan,
                   self._partials, Long(pool.stride(0)), self._qkv, width, rows, config.num_kv_heads,
                   config.head_dim**-0.5, 0.0)  # fmt: skip
            self._add_step(x, self._attended[:rows], layer.out, layer.out_bias)
            self._mlp_step(x, layer, rows)
        h, outputs = self._normed(x, weights.norm), config.vocab_size
        if self._products.launch(weights.head, h, None, None, self._logits, Ending.LOGITS):
            return self._logits[:rows]
        logits = self._logits.view(-1).view(x.dtype)[: rows * outputs].view(rows, outputs)
        torch.mm(h, weights.head, out=logits)
        return logits

    def kernels(self, buckets: Sequence[int]) -> list[Launch]:
        """All launches of decode steps, to be compiled ahead; prompts need no others."""
        config, found = self.config, [self._planner, self._attention]
        hidden, inner = config.hidden_size, config.intermediate_size
        for rows in buckets:
            for outputs, inputs, ending, norm in (
                (self._qkv, hidden, Ending.ROPE, True),
                (hidden, self._q, Ending.RESIDUAL, False),
                (inner, hidden, Ending.SILU, True),
                (hidden, inner, Ending.RESIDUAL, False),
                (config.vocab_size, hidden, Ending.LOGITS, False),
            ):
                if (product := self._products.find(outputs, inputs, rows, ending, norm)) is not None:
                    found.append(product.launch)
        found.append(launches.rms_norm(hidden, 1, self.dtype))
        found.append(launches.rope_write(self._heads, 1, self.dtype))
        found.append(launches.gather_tiles(self._heads, 1, self.dtype))
        found.append(launches.silu_mul(inner, 1, self.dtype))
        return found

    def _qkv_step(self, x: Tensor, layer: LlamaLayer, rows: int, rope: bytes) -> None:
        out, bias, norm = self._qkv_out[:rows], layer.qkv_bias, layer.attention_norm
        if not self._products.launch(layer.qkv, x, norm, bias, out, Ending.ROPE, rope):
            _linear(self._normed(x, norm), layer.qkv, bias, out)
            self._gpu.launch(launches.rope_write(self._heads, rows, self.dtype), out, rows, rope)

    def _mlp_step(self, x: Tensor, layer: LlamaLayer, rows: int) -> None:
        inner, bias, norm = self._inner[:rows], layer.gate_up_bias, layer.mlp_norm
        if not self._products.launch(layer.gate_up, x, norm, bias, inner, Ending.SILU):
            both = self._gate_up[:rows]
            _linear(self._normed(x, norm), layer.gate_up, bias, both)
            silu = launches.silu_mul(self.config.intermediate_size, rows, self.dtype)
            self._gpu.launch(silu, both, inner, rows)
        self._add_step(x, inner, layer.down, layer.down_bias)

    def _add_step(self, x: Tensor, more: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if not self._products.launch(weight, more, None, bias, x, Ending.RESIDUAL):
            _add_linear(x, more, weight, bias)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        rows, hidden = x.shape
        out = self._h[:rows]
        norm = launches.rms_norm(hidden, rows, self.dtype)
        self._gpu.launch(norm, x, None, weight, out, self.config.rms_norm_eps)
        return out


def _attention_launches(
    shape: attention.AttentionShape, geometry: attention.Geometry, multiprocessors: int
) -> tuple[Launch, Launch]:
    """The planner, whose shared memory depends on the rows, and the attention."""
    planner, kernel = attention.kernels(shape, geometry)
    grid = multiprocessors * geometry.ctas
    return (
        Launch(planner, "plan_attention", (1, 1), 1024),
        Launch(kernel, "paged_attention", (grid, 1), 32 * geometry.warps, geometry.shared_bytes),
    )


def _sdpa(pieces: Sequence[Piece]) -> list[SDPBackend]:
    """cuDNN is the fastest, but makes a plan for each shape that it has not met, for 70 ms: only for regular ones."""
    regular = all(piece.start or piece.tokens % _REGULAR == 0 for piece in pieces)
    return _SDPA if regular else _SDPA[1:]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    residual.addmm_(x, weight)
    if bias is not None:
        residual.add_(bias)


def _visible(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[end - start, end] bool: causal, and within the sliding window if there is one."""
    query, key = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
