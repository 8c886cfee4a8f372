"""The state of a decode batch on the card, and the host's picture of it, from which the differences follow.

All of it is one array of ints: tokens, positions, lengths, block tables, end tokens, sampling parameters. A step's
graph begins by applying the host's changes from a ring of pinned memory and ends by moving every row on, so that the
host sends a row only when it joins, leaves, or gets a block. The lowest free place is next; a row keeps its place
while it runs, or moves down on the card when the batch has shrunk.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Gpu
from engine.backend.launches import RING_HEADER, Launch
from engine.batch import Row, SampleInput
from engine.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

RING = 8  # steps that may be launched and not read
_ENTRY = 1 << 14  # ints of one step's changes; more go through a copy of their own
_MOST_ENDS = MAX_STOP_TOKEN_IDS + 32
_PARAMS = launches.SAMPLE_ROW.size // 4

EMITTED = 1  # what a row did, as in advance.cu; other bits mean that it is empty now


@dataclass(slots=True, eq=False)
class Place:
    """The host's picture of one row. `position` is where the next step writes; `live` is False once the row is empty.

    `blocks` and `output` are the sequence's own lists, which grow: that they are the same objects says that this is the
    same sequence, without comparing them.
    """

    index: int
    blocks: Sequence[int]
    output: Sequence[int]
    params: SamplingParams
    position: int
    joined: int  # the step with which it came
    sent: int  # blocks of its table that the card has
    live: bool = True


class BatchState:
    """`max_rows` rows, tables of at most `max_blocks` blocks. `step` counts the steps launched so far."""

    def __init__(self, gpu: Gpu, max_rows: int, max_blocks: int, vocab_size: int, block_size: int) -> None:
        self.gpu = gpu
        self.max_rows = max_rows
        self.width = max_blocks
        self.step = 0
        self.places: dict[int, Place] = {}  # by slot
        self._most = max_rows  # all of them are below it
        self._vocab, self._block_size = vocab_size, block_size
        self._free = list(range(max_rows))
        self._widths = dict.fromkeys(("tokens", "positions", "lengths", "indices", "remaining", "ends", "counted"), 1)
        self._widths |= {"tables": max_blocks, "end_ids": _MOST_ENDS, "params": _PARAMS}
        self._widths |= {"bias_ids": MAX_LOGIT_BIAS, "bias_values": MAX_LOGIT_BIAS}
        self._at = self._offsets(max_rows)
        self._state = torch.zeros(self._at["end"], dtype=torch.int32, device=gpu.device)
        self.tokens, self.positions, self.lengths, self.indices, self.remaining, self.ends, self.counted = (
            self._view(name, max_rows)
            for name in ("tokens", "positions", "lengths", "indices", "remaining", "ends", "counted")
        )
        self.positions.fill_(-1)
        self.tokens.fill_(-1)
        self.tables = self._view("tables", max_rows * self.width).view(max_rows, self.width)
        self.tables.fill_(-1)
        self.end_ids = self._view("end_ids", max_rows * _MOST_ENDS)
        self.params = self._view("params", max_rows * _PARAMS)
        self.bias_ids = self._view("bias_ids", max_rows * MAX_LOGIT_BIAS)
        self.bias_values = self._view("bias_values", max_rows * MAX_LOGIT_BIAS)
        self.counts = torch.zeros(max_rows, vocab_size, dtype=torch.int32, device=gpu.device)
        self.scratch = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=gpu.device)
        self.sampled = torch.zeros(max_rows, dtype=torch.int32, device=gpu.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=gpu.device)
        self.began = torch.zeros(1, dtype=torch.int64, device=gpu.device)
        self._changes = gpu.pinned(RING, _ENTRY)
        self._entries = self._changes.numpy()  # the same memory
        # Offset -> values, for the next step. One entry an offset: the card writes them in any order.
        self._to: dict[int, Sequence[int]] = {}
        self._counting: list[tuple[int, Sequence[int], Sequence[int]]] = []

    def _offsets(self, rows: int) -> dict[str, int]:
        """Of each array, in ints; all begin at multiples of 16, because parameters hold 64-bit numbers."""
        found, end = {}, 0
        for name, width in self._widths.items():
            found[name], end = end, end + -(-rows * width // 16) * 16
        return found | {"end": end}

    def _view(self, name: str, size: int) -> Tensor:
        return self._state[self._at[name] : self._at[name] + size]

    # ---- rows -----------------------------------------------------------------------------------------------------

    def arrange(self, rows: Sequence[Row], most: int) -> list[Place]:
        """Notes what the card has to be told so that its next step runs exactly these rows; their places, all of them
        below `most`."""
        assert len(rows) <= most, f"{len(rows)} rows in {most} places"
        places: list[Place | None] = []
        for row in rows:
            place = self.places.get(row.slot)
            places.append(place if place is not None and _same(place, row) else None)
        if len(rows) - places.count(None) < len(self.places):
            staying = {place.index for place in places if place is not None}
            for slot, held in list(self.places.items()):
                if held.index not in staying:
                    self._leave(slot)
        if most < self._most and (high := [held for held in self.places.values() if held.index >= most]):
            self._move(high)
        self._most = most
        arranged: list[Place] = []
        for row, place in zip(rows, places, strict=True):
            if place is None or not place.live or place.position != row.start:
                place = self._join(row, place)
            elif len(row.blocks) > place.sent:
                self._send_blocks(place)
            place.position += 1
            arranged.append(place)
        return arranged

    def _move(self, places: Sequence[Place]) -> None:
        """To the lowest free places, at once and on the card, which alone knows their newest tokens."""
        before = [place.index for place in places]
        after = [heapq.heappop(self._free) for _ in places]
        spans = [(self._at[name], width) for name, width in self._widths.items()]
        offsets = [
            np.concatenate([np.arange(at + index * width, at + (index + 1) * width) for at, width in spans])
            for index in (*before, *after)
        ]
        old, new = self.gpu.to_device(np.stack(offsets)).long().view(2, -1).unbind()
        self._state[new] = self._state[old]
        rows = self.gpu.to_device([*before, *after]).long()
        self.counts[rows[len(before) :]] = self.counts[rows[: len(before)]]
        for place, index in zip(places, after, strict=True):
            for name in ("tokens", "positions", "lengths"):  # of the row that left this place
                self._to.pop(self._at[name] + index, None)
            self._empty(place.index)
            heapq.heappush(self._free, place.index)
            place.index = index

    def clear(self) -> None:
        """Every row leaves."""
        for slot in list(self.places):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        place = self.places.pop(slot)
        if place.live:
            self._empty(place.index)
        heapq.heappush(self._free, place.index)

    def _empty(self, index: int) -> None:
        self._put("tokens", index, -1)
        self._put("positions", index, -1)
        self._put("lengths", index, 0)

    def _join(self, row: Row, before: Place | None) -> Place:
        sample = row.sample
        assert row.tokens and sample is not None, f"slot {row.slot} joins without its token"
        params = sample.params
        index = heapq.heappop(self._free) if before is None else before.index
        place = Place(index, row.blocks, sample.output, params, row.start, self.step, 0)
        self.places[row.slot] = place
        self._put("tokens", index, row.tokens[-1])
        self._put("positions", index, row.start)
        self._put("lengths", index, row.start + 1)
        self._put("indices", index, sample.index)
        self._put("remaining", index, (params.max_tokens or 1 << 30) - sample.index)
        self._send_blocks(place)
        if before is None:
            self._send_params(index, sample)
        return place

    def _send_params(self, index: int, sample: SampleInput) -> None:
        params = sample.params
        masked = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else sample.eos)
        ends = sorted(masked)[:_MOST_ENDS]
        penalized = bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)
        packed = launches.SAMPLE_ROW.pack(
            params.temperature, params.top_p, params.min_p, min(params.top_k, 2**31 - 1), params.repetition_penalty,
            params.frequency_penalty, params.presence_penalty, params.min_tokens, params.seed or 0,
            len(params.logit_bias), len(ends), int(penalized),
        )  # fmt: skip
        self._put("params", index * _PARAMS, *struct.unpack(f"<{_PARAMS}i", packed))
        self._put("ends", index, len(ends))
        self._put("counted", index, int(penalized))
        if ends:
            self._put("end_ids", index * _MOST_ENDS, *ends)
        if params.logit_bias:
            values = list(params.logit_bias.values())
            self._put("bias_ids", index * MAX_LOGIT_BIAS, *params.logit_bias)
            bits = struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values))
            self._put("bias_values", index * MAX_LOGIT_BIAS, *bits)
        if penalized:
            self._counting.append((index, sample.prompt, list(sample.output)))

    def _send_blocks(self, place: Place) -> None:
        """What the card's table lacks, and behind it the end: a longer table's rest must not look like more."""
        first, last = place.sent, min(len(place.blocks), self.width)
        values = list(place.blocks[first:last])
        if last < self.width:
            values.append(-1)
        self._put("tables", place.index * self.width + first, *values)
        place.sent = last

    def _put(self, name: str, index: int, *values: int) -> None:
        self._to[self._at[name] + index] = values

    def did(self, place: Place, step: int, flags: int) -> None:
        """What the card says about a row's step: one that ended, or has no block to go on, is empty now."""
        if flags != EMITTED and step >= place.joined:
            place.live = False

    # ---- launches -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hands the changes to the next step, before its graph is launched."""
        for index, prompt, output in self._counting:
            self._count(index, prompt, output)
        self._counting.clear()
        changes, self._to = self._to, {}
        entry = self._entries[self.step % RING]
        entry[0] = 0
        if not changes:
            return
        head: list[int] = [len(changes)]
        body: list[int] = []
        first = 1 + 3 * len(changes)
        for to, values in changes.items():
            head += (to, first + len(body), len(values))
            body += values
        if len(head) + len(body) <= _ENTRY:
            entry[: len(head) + len(body)] = array("i", head + body)
            return
        packed = self.gpu.to_device(head + body)
        apply = launches.apply(self._vocab, self._block_size, min(len(changes), 1024))
        self.gpu.launch(apply, self._state, packed, overlap=False)

    def _count(self, index: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        ids = [self.gpu.to_device(list(some) or [-1]) for some in (prompt, output)]
        launch = launches.count(self._vocab, self._block_size)
        self.gpu.launch(launch, self.counts[index], ids[0], len(prompt), ids[1], len(output), overlap=False)

    def apply_changes(self) -> None:
        """The first launch of a step's graph."""
        self.gpu.launch(
            launches.next_changes(), self._state, self._changes, _ENTRY, RING, self.counter, self.began, overlap=False
        )

    def sample(self, logits: Tensor, rows: int) -> None:
        dtype = "float32" if logits.dtype == torch.float32 else str(logits.dtype).removeprefix("torch.")
        launch = launches.sample(self._vocab, rows, dtype)
        self.gpu.launch(
            launch, logits, self.params, self.positions, self.indices, self.counts, self.bias_ids, self.bias_values,
            MAX_LOGIT_BIAS, self.end_ids, _MOST_ENDS, self.scratch, self.sampled,
        )  # fmt: skip

    def advance(self, rows: int, ring: Tensor) -> None:
        """The last launch of a step's graph: `ring` [RING, RING_HEADER + 2 * rows] gets what the rows did."""
        held = (
            self.tokens, self.positions, self.lengths, self.indices, self.remaining, self.tables, self.end_ids,
            self.ends, self.counts, self.counted,
        )  # fmt: skip
        packed = launches.ROW_STATE.pack(*(tensor.data_ptr() for tensor in held), self.width, _MOST_ENDS)
        launch = launches.advance(self._vocab, self._block_size, rows)
        self.gpu.launch(launch, self.sampled, packed, rows, ring, RING, self.counter, self.began)

    def ring(self, rows: int) -> Tensor:
        return self.gpu.pinned(RING, RING_HEADER + 2 * rows)

    def kernels(self, dtypes: Sequence[str]) -> list[Launch]:
        found = [launches.sample(self._vocab, 1, dtype) for dtype in dtypes]
        found += [launches.logprobs(self._vocab, 1, dtype) for dtype in dtypes]
        return [
            *found,
            launches.advance(self._vocab, self._block_size, 1),
            launches.next_changes(),
        ]


def _same(place: Place, row: Row) -> bool:
    """Whether this is the sequence that has the place."""
    sample = row.sample
    return (
        place.blocks is row.blocks
        and sample is not None
        and place.output is sample.output
        and place.params is sample.params
    )
