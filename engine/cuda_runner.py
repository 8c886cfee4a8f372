"""Steps of a model on CUDA: prompts launched as they come, decode rows by replaying one graph for the whole batch.

The same interface as engine.runner.ModelRunner, and two halves of it: `submit` launches a step and `collect` waits for
it, so that the card has the next step before the host has read the last one. A row whose newest token the host does not
know yet (no tokens in its Row) goes on with what the card sampled. Owns graphs and rings; allocates no block.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Gpu
from engine.backend.launches import RING_HEADER
from engine.batch import Batch, Row, SampleInput, StepOutput
from engine.config import EngineConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_logprobs import Reports, launch_reports
from engine.cuda_state import EMITTED, RING, BatchState, Place
from engine.models.cuda_decode import DecodeInputs, Places
from engine.models.llama import Llama
from engine.models.llama_cuda import CudaLlama, Piece
from engine.sampler import sample
from engine.types import Token, TokenLogprob

_new = tuple.__new__  # of a NamedTuple, at half its constructor's price
_LOGIT_ROWS = 256  # prompt log probabilities are computed in pieces: a row of logits has the vocabulary's width


@dataclass(slots=True, eq=False)
class Graph:
    """One batch bucket's whole step, and where it reports."""

    rows: int
    ring: Tensor
    logits: Tensor
    replay: Callable[[], None]


@dataclass(slots=True, eq=False)
class Launched:
    """A step that was launched and not read yet."""

    batch: Batch
    began: float
    step: int = 0
    graph: Graph | None = None
    places: list[Place] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the places when it was launched
    decodes: list[int] = field(default_factory=list)  # rows of the batch
    sampling: list[int] = field(default_factory=list)
    sampled: Tensor | None = None  # on the host once `done`
    reports: list[Sequence[TokenLogprob]] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    asked: list[tuple[Sequence[int], Reports]] = field(default_factory=list)  # of the tokens of these rows
    asked_of_prompts: list[tuple[int, Reports]] = field(default_factory=list)  # a row's, in order
    sums: Tensor | None = None  # of the blocks to be digested, on the host once `done`
    done: torch.cuda.Event | None = None

    @property
    def ended(self) -> bool:
        """On the card: collect() does not wait."""
        return self.done is not None and self.done.query()


class CudaRunner:
    """Not thread-safe: one thread calls it. `depth` steps may be launched before the first is collected."""

    depth = 2

    def __init__(
        self, weights: Llama, config: EngineConfig, cache: CudaKVCache, gpu: Gpu, *, graphs: bool = True
    ) -> None:
        self.config = config
        self.cache = cache
        self.layout = cache.layout
        self.vocab_size = weights.config.vocab_size
        self.eos_token_ids = weights.config.eos_token_ids
        self.gpu = gpu
        rows = config.max_num_seqs if graphs else 1
        self.buckets = _buckets(rows)
        self.model = CudaLlama(weights, cache.layout, gpu, rows, config.max_model_len)
        self._with_graphs = graphs
        self._state = BatchState(gpu, rows, config.max_blocks_per_seq, self.vocab_size, config.block_size)
        self._inputs = DecodeInputs(
            self._state.tokens, self._state.lengths, Places(self._state.positions, self._state.tables, None)
        )  # fmt: skip
        self._graphs: dict[int, Graph] = {}
        self.card_times: deque[tuple[int, int]] = deque(maxlen=1024)  # of recent decode steps: began, ended, in ns
        gpu.catch_up()  # the norms that are folded, the state that is filled

    def warm_up(self) -> None:
        """Compiles what is not in the cache, and records the graph of every bucket, the largest first."""
        dtypes = ["float32", self.config.dtype]
        wanted = self.model.kernels(self.buckets) + self._state.kernels(dtypes)
        self.gpu.compile(launch.kernel for launch in wanted)
        if self._with_graphs:
            for rows in reversed(self.buckets):
                self._state.flush()
                self._decode(rows)

    def use(self, cache: CudaKVCache, config: EngineConfig) -> None:
        """Another pool, before any graph is recorded; `config` differs in num_blocks alone."""
        assert not self._graphs, "graphs hold the pool's address"
        self.cache, self.config = cache, config

    # ---- a step ---------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepOutput:
        return self.collect(self.submit(batch))

    def submit(self, batch: Batch) -> Launched:
        launched = Launched(batch, time.perf_counter(), reports=[()] * len(batch.rows))
        with self.gpu.on_stream():
            decodes, chunks = self._split(batch.rows)
            if chunks:  # a block that decode fills is never read beyond what was written
                self.cache.zero(batch.zero_blocks)
            if decodes:
                self._launch_decodes(launched, decodes)
            if chunks:
                self._launch_chunks(launched, chunks)
            launched.sums = self.cache.launch_digests(batch.digests)
            launched.done = self.gpu.mark()
        return launched

    def collect(self, launched: Launched) -> StepOutput:
        assert launched.done is not None, "a step is collected once, after it was launched"
        launched.done.synchronize()
        batch = launched.batch
        tokens: list[Token | None] = [None] * len(batch.rows)
        for rows, reports in launched.asked:
            launched.logprobs.update(zip(rows, reports.read(), strict=True))
        for row, reports in launched.asked_of_prompts:
            launched.reports[row] = [*launched.reports[row], *reports.read()]
        if launched.graph is not None:
            self._read_ring(launched, tokens)
        if launched.sampled is not None:
            for i, token_id in zip(launched.sampling, launched.sampled.tolist(), strict=True):
                if (one := batch.rows[i].sample) is not None:
                    tokens[i] = Token(one.index, token_id, launched.logprobs.get(i))
        digests = self.cache.digests(batch.digests, launched.sums)
        return StepOutput(tokens, launched.reports, digests, time.perf_counter() - launched.began)

    def abandon(self) -> None:
        """After a step that failed: waits for all that was launched, and forgets it."""
        self.gpu.stream.synchronize()
        self._state.clear()

    def _split(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Rows that the graph runs, and the others: chunks, and what comes with more wishes than a sampled token."""
        decodes: list[int] = []
        chunks: list[int] = []
        for i, row in enumerate(rows):
            alone = len(row.tokens) <= 1 and row.sample is not None and row.prompt_logprobs is None
            if alone and self._with_graphs and len(decodes) < self._state.max_rows:
                decodes.append(i)
            else:
                chunks.append(i)
        return decodes, chunks

    # ---- decode rows ----------------------------------------------------------------------------------------------

    def _launch_decodes(self, launched: Launched, decodes: list[int]) -> None:
        rows, state = launched.batch.rows, self._state
        mine = [rows[i] for i in decodes]
        launched.places = state.arrange(mine, self._room(len(mine)))
        launched.indices = [place.index for place in launched.places]
        launched.decodes, launched.step = decodes, state.step
        state.flush()
        last = max(launched.indices)
        launched.graph = self._decode(next(bucket for bucket in self.buckets if bucket > last))
        wanting = [
            (i, place.index)
            for i, place in zip(decodes, launched.places, strict=True)
            if place.params.logprobs is not None
        ]
        if wanting:
            self._report(launched, launched.graph.logits, wanting, state.sampled)

    def _room(self, rows: int) -> int:
        """Places for so many. At a bucket's edge rows stay where they are: the next to come would move them again."""
        for bucket in self.buckets:
            if rows <= bucket - bucket // 16:
                return bucket
        return self._state.max_rows

    def _decode(self, rows: int) -> Graph:
        """Launches one step of the bucket; the first time it is recorded, too."""
        state, known = self._state, self._graphs.get(rows)
        state.step += 1
        if known is not None:
            known.replay()
            return known
        ring, logits = state.ring(rows), []

        def body() -> None:
            state.apply_changes()
            logits.append(self.model.decode(self._inputs, rows, self.cache.data))
            state.sample(logits[-1], rows)
            state.advance(rows, ring)

        replay = self.gpu.capture(body)
        graph = self._graphs[rows] = Graph(rows, ring, logits[-1], replay)
        return graph

    def _read_ring(self, launched: Launched, tokens: list[Token | None]) -> None:
        graph, step = launched.graph, launched.step
        assert graph is not None
        entry = graph.ring[step % RING].numpy()
        assert entry[0] == step, f"step {step} is not in its place of the ring, where step {entry[0]} is"
        began, ended = entry[2:6].view(np.uint64).tolist()
        self.card_times.append((began, ended))
        found = entry[RING_HEADER : RING_HEADER + graph.rows].tolist()
        flags = entry[RING_HEADER + graph.rows :].tolist()
        rows, logprobs = launched.batch.rows, launched.logprobs
        for i, place, index in zip(launched.decodes, launched.places, launched.indices, strict=True):
            did, one = flags[index], rows[i].sample
            if did != EMITTED:
                self._state.did(place, step, did)
            if did and one is not None:
                tokens[i] = _new(Token, (one.index, found[index], logprobs.get(i)))

    # ---- prompts --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _launch_chunks(self, launched: Launched, chunks: list[int]) -> None:
        rows = launched.batch.rows
        order = sorted(chunks, key=lambda i: (rows[i].start > 0, len(rows[i].tokens)))
        packed = _Packed([rows[i] for i in order], self.config, self.gpu)
        hidden = self.model.prompts(packed.token_ids, packed.places, packed.pieces, self.cache.data)
        first = 0
        for i in order:
            row = rows[i]
            if row.prompt_logprobs is not None:
                found = self._prompt_logprobs(row, hidden[first : first + len(row.targets)], row.prompt_logprobs)
                launched.asked_of_prompts += [(i, reports) for reports in found]
            first += len(row.tokens)
        sampling = [i for i in order if rows[i].sample is not None]
        if not sampling:
            return
        logits = self.model.logits(hidden.index_select(0, packed.lasts))
        inputs = [one for i in sampling if (one := rows[i].sample) is not None]
        chosen = self._choose(logits, inputs)
        launched.sampling = sampling
        launched.sampled = self.gpu.to_host(chosen)
        wanting = [(i, place) for place, i in enumerate(sampling) if _logprobs(rows[i]) is not None]
        if wanting:
            self._report(launched, logits, wanting, chosen)

    def _choose(self, logits: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
        """Token ids, int32 on the card. The kernel takes the rows whose logits no parameter changes."""
        packed = bytearray()
        for one in inputs:
            p = one.params
            packed += launches.SAMPLE_ROW.pack(
                p.temperature, p.top_p, p.min_p, p.top_k, 1.0, 0.0, 0.0, 0, p.seed or 0, 0, 0, 0
            )
        count = len(inputs)
        words = struct.unpack(f"<{len(packed) // 4}i", packed)
        values = self.gpu.to_device([*words, *(one.index for one in inputs), *[0] * count])
        params, indices, positions = values.split([len(words), count, count])
        chosen = torch.empty(count, dtype=torch.int32, device=logits.device)
        self.gpu.launch(
            launches.sample(self.vocab_size, count, "float32"), logits, params, positions, indices, None, None, None, 0,
            None, 0, None, chosen, overlap=False,
        )  # fmt: skip
        for i, one in enumerate(inputs):
            p = one.params
            penalized = p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty
            if p.logit_bias or penalized or one.index < p.min_tokens:
                (token,) = sample(logits[i : i + 1], [one])
                chosen[i] = token.token_id
        return chosen

    def _prompt_logprobs(self, row: Row, hidden: Tensor, count: int) -> list[Reports]:
        found: list[Reports] = []
        for first in range(0, len(row.targets), _LOGIT_ROWS):
            targets = row.targets[first : first + _LOGIT_ROWS]
            logits, places = self.model.logits(hidden[first : first + _LOGIT_ROWS]), range(len(targets))
            tokens, counts = self.gpu.to_device(targets), [count] * len(targets)
            found.append(launch_reports(self.gpu, logits, places, tokens, counts, by_row=False))
        return found

    def _report(self, launched: Launched, logits: Tensor, wanting: Sequence[tuple[int, int]], tokens: Tensor) -> None:
        """Of the token that each row (of the batch, of `logits` and `tokens`) samples."""
        rows, places = zip(*wanting, strict=True)
        counts = [_logprobs(launched.batch.rows[i]) or 0 for i in rows]
        reports = launch_reports(self.gpu, logits, places, tokens, counts, by_row=True)
        launched.asked.append((rows, reports))


class _Packed:
    """The chunks of a step side by side, and their index tensors, which reach the card in one copy."""

    def __init__(self, rows: Sequence[Row], config: EngineConfig, gpu: Gpu) -> None:
        counts = [len(row.tokens) for row in rows]
        total, size = sum(counts), config.block_size
        ends = [row.start + count for row, count in zip(rows, counts, strict=True)]
        needed = [-(-end // size) for end in ends]
        width = max(needed)
        for row, end, blocks in zip(rows, ends, needed, strict=True):
            assert row.tokens and blocks <= len(row.blocks), (
                f"slot {row.slot}: {len(row.blocks)} blocks for {end} tokens"
            )
            assert end <= config.max_model_len, f"slot {row.slot}: {end} tokens, at most {config.max_model_len}"
        lasts = [last - 1 for last, row in zip(np.cumsum(counts).tolist(), rows, strict=True) if row.sample is not None]
        packed = np.empty(3 * total + len(rows) * width + len(lasts), dtype=np.int32)
        tokens, positions, table_rows, tables, last = np.split(
            packed, np.cumsum([total, total, total, len(rows) * width]).tolist()
        )
        first = 0
        for i, (row, count, blocks) in enumerate(zip(rows, counts, needed, strict=True)):
            tokens[first : first + count] = row.tokens
            positions[first : first + count] = np.arange(row.start, row.start + count)
            table_rows[first : first + count] = i
            tables[i * width : i * width + blocks] = row.blocks[:blocks]
            tables[i * width + blocks : (i + 1) * width] = -1
            first += count
        last[:] = lasts
        held = gpu.to_device(packed).split([total, total, total, len(rows) * width, len(lasts)])
        self.token_ids, self.lasts = held[0], held[4]
        self.places = Places(held[1], held[3].view(len(rows), width), held[2])
        self.pieces = self._pieces(rows, counts, needed)

    def _pieces(self, rows: Sequence[Row], counts: list[int], needed: list[int]) -> list[Piece]:
        """Neighbours of one length that begin at 0 are one piece."""
        pieces: list[Piece] = []
        first = 0
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            before = pieces[-1] if pieces else None
            if row.start == 0 and before is not None and before.start == 0 and before.tokens == count:
                pieces[-1] = Piece(before.first, before.count + 1, count, 0, None)
            else:
                blocks = self.places.tables[i, : needed[i]] if row.start else None
                pieces.append(Piece(first, 1, count, row.start, blocks))
            first += count
        return pieces


def _buckets(most: int) -> list[int]:
    """1, 2, 4, 8, 16, ..., from 64 on what lies halfway, too, and the most itself."""
    doubled = {1 << i for i in range(most.bit_length())}
    halfway = {3 << i for i in range(5, most.bit_length())}
    return sorted({size for size in doubled | halfway if size < most} | {most})


def _logprobs(row: Row) -> int | None:
    return None if row.sample is None else row.sample.params.logprobs
