"""A card that is not there: engine.backend.cuda.Gpu on the CPU, with every kernel written out in plain torch.

It lets the CUDA runner's own logic (which row goes where, what the host sends, what it reads and when) be tested
without a card. A captured graph is its body called again, so whatever a body would bake in, it bakes in here too.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_signatures import check
from torch import Tensor

from engine.backend import launches
from engine.backend.launches import Launch
from engine.backend.nvcc import Kernel
from engine.backend.products import Ending
from engine.batch import SampleInput
from engine.kv_digest import block_sum
from engine.sampler import prompt_logprobs, sample
from engine.types import SamplingParams

_TYPES = {torch.int32: ctypes.c_int32, torch.float32: ctypes.c_float, torch.uint8: ctypes.c_uint8}


def at(address: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Memory as a tensor: on the CPU an address is one."""
    count = 1
    for size in shape:
        count *= size
    held = (_TYPES[dtype] * max(count, 1)).from_address(address)
    return torch.frombuffer(held, dtype=dtype, count=count).view(shape)


class Done:
    """An event, and a stream: everything was done when it was asked for."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Done) -> None:
        pass


class EmulatedGpu:
    device = "cpu"
    name = "an emulated card"
    multiprocessors = 2
    shared_per_multiprocessor = 228 << 10
    clusters = True

    def __init__(self) -> None:
        self.stream = Done()
        self.launched: list[str] = []
        self.opened: list[int] = []  # other processes' pools
        self.sizes: dict[int, int] = {}  # of those
        self.kernels: set[Kernel] = set()
        self._lengths: Tensor | None = None

    def on_stream(self) -> Any:
        return contextlib.nullcontext()

    def pool(self, size: int) -> Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN, where it is read as floats

    def pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def to_device(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32)

    def to_host(self, values: Tensor) -> Tensor:
        return values.clone()

    def catch_up(self) -> None:
        self.launched.append("catch_up")

    def mark(self, *, sleeping: bool = False) -> Done:
        return Done()

    def beside(self) -> EmulatedGpu:
        return self

    def twin(self) -> EmulatedGpu:
        return copy.copy(self)

    def export(self, pool: Tensor) -> bytes:
        return pool.data_ptr().to_bytes(8, "little") + pool.nbytes.to_bytes(8, "little") + bytes(48)

    def open(self, handle: bytes) -> int:
        self.opened.append(int.from_bytes(handle[:8], "little"))
        self.sizes[self.opened[-1]] = int.from_bytes(handle[8:16], "little")
        return self.opened[-1]

    def size(self, address: int) -> int | None:
        return self.sizes.get(address)

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def compile(self, kernels: Iterable[Any]) -> None:
        list(kernels)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body

    def launch(self, launch: Launch, *arguments: Any, overlap: bool = True, yields: bool = False) -> None:
        self.launched.append(launch.function)
        self.kernels.add(launch.kernel)
        settings = dict(launch.kernel.settings)
        check(launch, arguments)
        getattr(self, f"_{launch.function}")(settings, *arguments)

    # ---- state ----------------------------------------------------------------------------------------------------

    def _next_changes(self, settings: Any, state: Tensor, ring: Tensor, ints: int, entries: int, step: Tensor,
                      began: Tensor) -> None:  # fmt: skip
        self._apply(settings, state, ring.view(-1)[int(step) % entries * ints :])

    def _apply(self, settings: Any, state: Tensor, changes: Tensor) -> None:
        written: set[int] = set()
        for run in range(int(changes[0])):
            to, first, length = changes[1 + 3 * run : 4 + 3 * run].tolist()
            assert written.isdisjoint(range(to, to + length)), "a card makes changes in any order"
            written.update(range(to, to + length))
            state[to : to + length] = changes[first : first + length]

    def _count(self, settings: Any, counts: Tensor, prompt: Tensor, n: int, output: Tensor, m: int) -> None:
        counts.zero_()
        counts[prompt[:n].long()] = -(1 << 31)
        counts += torch.bincount(output[:m].long(), minlength=settings["VOCAB"]).int()

    def _advance(self, settings: Any, sampled: Tensor, packed: bytes, rows: int, ring: Tensor, entries: int,
                 step: Tensor, began: Tensor) -> None:  # fmt: skip
        *pointers, width, end_width = launches.ROW_STATE.unpack(packed)
        tokens, positions, lengths, indices, remaining = (at(pointer, rows) for pointer in pointers[:5])
        tables, end_ids = at(pointers[5], rows, width), at(pointers[6], rows, end_width)
        ends, counts, counted = at(pointers[7], rows), at(pointers[8], rows, settings["VOCAB"]), at(pointers[9], rows)
        entry = ring[int(step) % entries]
        for r in range(rows):
            token, did = -1, 0
            if (position := int(positions[r])) >= 0:
                token, did = int(sampled[r]), 1
                if counted[r]:
                    counts[r, token] += 1
                if token in end_ids[r, : int(ends[r])].tolist():
                    did |= 2
                remaining[r] -= 1
                indices[r] += 1
                if remaining[r] <= 0:
                    did |= 4
                block = (position + 1) // settings["BLOCK_SIZE"]
                if did == 1 and (block >= width or tables[r, block] < 0):
                    did |= 8
                on = did == 1
                tokens[r], positions[r], lengths[r] = (token, position + 1, position + 2) if on else (-1, -1, 0)
            entry[launches.RING_HEADER + r], entry[launches.RING_HEADER + rows + r] = token, did
        entry[0] = step[0]
        step += 1

    def _zero_blocks(self, settings: Any, pool: Tensor, ids: Tensor) -> None:
        pool[ids.long()] = 0

    def _copy_and_digest(
        self, settings: Any, to: Tensor, source: int, to_ids: Tensor, from_ids: Tensor, sums: Tensor, count: int
    ) -> None:
        size = settings["BLOCK_BYTES"]
        for target, origin in zip(to_ids[:count].tolist(), from_ids[:count].tolist(), strict=True):
            to[target] = at(source + origin * size, size, dtype=torch.uint8)
        self._digest_blocks(settings, to, to_ids, sums, count)

    def _digest_blocks(self, settings: Any, pool: Tensor, ids: Tensor, sums: Tensor, count: int) -> None:
        assert not sums.any() and sums.data_ptr() % 8 == 0
        for i, block in enumerate(ids[:count].tolist()):
            total = block_sum(pool[block].numpy().tobytes())
            sums.view(torch.int64)[i] = total - (total >> 63 << 64)

    def _gather_tiles(self, settings: Any, out: Tensor, layer: Tensor, ids: Tensor, stride: int) -> None:
        size = stride // layer.element_size()
        for i, block in enumerate(ids.tolist()):
            there = torch.as_strided(layer, layer.shape, layer.stride(), layer.storage_offset() + block * size)
            length = layer.shape[2]
            out[:, 0, :, i * length : (i + 1) * length] = there

    # ---- layers ---------------------------------------------------------------------------------------------------

    def _embed(self, settings: Any, table: Tensor, tokens: Tensor, out: Tensor) -> None:
        for r in range(len(out)):
            out[r] = table[int(tokens[r])] if tokens[r] >= 0 else 0

    def _rms_norm(
        self, settings: Any, x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float
    ) -> None:
        assert delta is None
        out.copy_(F.rms_norm(x, (x.shape[1],), weight, eps))

    def _silu_mul(self, settings: Any, both: Tensor, out: Tensor, rows: int) -> None:
        gate, up = both.chunk(2, -1)
        out.copy_(F.silu(gate) * up)

    def _gemv(self, settings: Any, w: Tensor, x: Tensor, norm: Tensor | None, bias: Tensor | None, out: Tensor,
              rows: int, eps: float, rope: bytes | None = None) -> None:  # fmt: skip
        assert w.is_contiguous() and x.is_contiguous() and out.is_contiguous()
        assert x.shape[1] == settings["K"] and bool(settings["NORM"]) == (norm is not None)
        h = x[:rows] if norm is None else F.rms_norm(x[:rows], (x.shape[1],), norm, eps)
        product = F.linear(h, w, bias)
        match Ending(settings["EPILOGUE"]):
            case Ending.RESIDUAL:
                out[:rows] += product
            case Ending.SILU:
                self._silu_mul({}, product, out[:rows], rows)
            case _:
                out[:rows] = product
        if rope is not None:
            self._rope_write(settings, out, rows, rope)

    def _rope_write(self, settings: Any, qkv: Tensor, count: int, rope: bytes) -> None:
        rotation, positions, tables, table_rows, pool, width, layer = launches.ROPE_ARGS.unpack(rope)
        assert qkv.dtype == torch.float32, "what is reached by address here is float32"
        heads, kv_heads, dim = settings["HEADS"], settings["KV_HEADS"], settings["HEAD_DIM"]
        size, layers = settings["BLOCK_SIZE"], settings["LAYERS"]
        split = qkv.view(-1, heads + 2 * kv_heads, dim)
        for r, position in enumerate(at(positions, count).tolist()):
            if position < 0:
                continue
            turn = torch.view_as_complex(at(rotation + position * dim * 4, dim // 2, 2, dtype=torch.float32))
            pairs = torch.view_as_complex(split[r, : heads + kv_heads].float().unflatten(-1, (-1, 2)).contiguous())
            split[r, : heads + kv_heads] = torch.view_as_real(pairs * turn).flatten(-2)
            table = r if table_rows == 0 else int(at(table_rows, count)[r])
            block = int(at(tables + 4 * (table * width + position // size), 1))
            assert block >= 0, f"row {r} writes position {position} to no block"
            place = pool + 4 * ((block * layers + layer) * 2 * kv_heads * size * dim)
            there = at(place, 2, kv_heads, size, dim, dtype=torch.float32)
            there[:, :, position % size] = split[r, heads:].view(2, kv_heads, dim)

    def _plan_attention(self, settings: Any, lengths: Tensor, tables: Tensor, plan: Tensor, rows: int, width: int,
                        kv_heads: int, grid: int) -> None:  # fmt: skip
        self._lengths = lengths

    def _paged_attention(self, settings: Any, q: Tensor, layer: Tensor, out: Tensor, tables: Tensor, plan: Tensor,
                         partials: Tensor, block_stride: int, q_stride: int, table_stride: int, rows: int,
                         kv_heads: int, scale: float, softcap: float, planned: int, behind: bytes) -> None:  # fmt: skip
        assert self._lengths is not None
        *weights, out_bytes, _, _, _ = launches.AHEAD.unpack(behind)
        assert (weights[0] == 0) == (out_bytes == 0)
        dim, group, size = settings["HEAD_DIM"], settings["GROUP"], settings["BLOCK_SIZE"]
        assert q_stride == q.stride(0) and table_stride == tables.stride(0)
        for r in range(rows):
            length = int(self._lengths[r])
            if length == 0:
                out[r] = 0
                continue
            parts = [
                torch.as_strided(
                    layer, (2, kv_heads, size, dim), layer.stride(), layer.storage_offset() + int(block) * block_stride
                )
                for block in tables[r, : -(-length // size)]
            ]
            k, v = torch.cat(parts, 2)[:, :, :length].unbind(0)
            query = q[r, : kv_heads * group * dim].view(kv_heads, group, dim)
            first = max(0, length - settings["WINDOW"]) if settings["WINDOW"] else 0
            k, v = k[:, first:], v[:, first:]
            weights = (torch.einsum("hgd,hnd->hgn", query, k) * scale).softmax(-1)
            out[r] = torch.einsum("hgn,hnd->hgd", weights, v).flatten()

    # ---- sampling -------------------------------------------------------------------------------------------------

    def _logprobs(self, settings: Any, logits: Tensor, rows: Tensor, tokens: Tensor, by_row: int, k: int,
                  out: Tensor) -> None:  # fmt: skip
        out.fill_(-1)
        for r, row in enumerate(rows.tolist()):
            token = int(tokens[row if by_row else r])
            (report,) = prompt_logprobs(logits[row : row + 1], [token], k)
            pairs = [value for candidate in report.top for value in candidate]
            out[r, 0], out[r, 1] = token, report.rank
            out[r, 3::2] = torch.tensor(pairs[0::2], dtype=torch.int32)
            floats = torch.tensor([report.logprob, *pairs[1::2]], dtype=torch.float32)
            out[r, 2::2] = floats.view(torch.int32)

    def _sample(self, settings: Any, logits: Tensor, params: Tensor, positions: Tensor, indices: Tensor,
                counts: Tensor | None, bias_ids: Tensor | None, bias_values: Tensor | None, bias_width: int,
                end_ids: Tensor | None, end_width: int, scratch: Tensor | None, tokens: Tensor) -> None:  # fmt: skip
        raw = params.contiguous().view(torch.uint8).numpy().tobytes()
        for r in range(len(logits)):
            if positions[r] < 0:
                continue
            (temperature, top_p, min_p, top_k, repetition, frequency, presence, min_tokens, seed, biases, ends,
             uses_counts) = launches.SAMPLE_ROW.unpack(raw[64 * r : 64 * r + 64])  # fmt: skip
            bias: dict[int, float] = {}
            if biases:
                assert bias_ids is not None and bias_values is not None
                first = r * bias_width
                values = bias_values[first : first + biases].contiguous().view(torch.float32).tolist()
                bias = dict(zip(bias_ids[first : first + biases].tolist(), values, strict=True))
            stops = [] if end_ids is None else end_ids[r * end_width : r * end_width + ends].tolist()
            prompt: list[int] = []
            output: list[int] = []
            if uses_counts:
                assert counts is not None
                seen = counts[r].tolist()
                prompt = [i for i, value in enumerate(seen) if value < 0]
                output = [i for i, value in enumerate(seen) for _ in range(value & 0x7FFFFFFF)]
            one = SamplingParams(
                temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, repetition_penalty=repetition,
                frequency_penalty=frequency, presence_penalty=presence, min_tokens=min_tokens, seed=seed,
                logit_bias=bias, stop_token_ids=stops, ignore_eos=True,
            )  # fmt: skip
            (token,) = sample(logits[r : r + 1].float(), [SampleInput(one, int(indices[r]), prompt, output)])
            tokens[r] = token.token_id
