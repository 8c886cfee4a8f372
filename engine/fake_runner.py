"""A runner without a model: every token follows from what its paged blocks really hold. No torch.

Each position's 8 bytes of "KV" are its token id + 1 and 32 bits of the hash of everything before it, read back
through the block table, as real KV depends on all earlier tokens. The next token is the hash of all of it, so a
missing, stale, swapped or wrong block gives other tokens. `fake_tokens` is the answer that a run must give.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence

import xxhash

from engine.batch import Batch, Row, SampleInput, StepOutput
from engine.kv_digest import kv_digest
from engine.messages import KvLayout
from engine.types import Candidate, SamplingParams, Token, TokenLogprob

BYTES_PER_TOKEN = 8
_LAYER = struct.Struct("<II")  # token id + 1 (0 means never written), hash of all earlier positions


def _extend(state: xxhash.xxh64, tokens: Iterable[int]) -> bytes:
    """The KV of `tokens` after everything already in `state`, which advances."""
    written = bytearray()
    for token in tokens:
        entry = _LAYER.pack(token + 1, state.intdigest() & 0xFFFFFFFF)
        state.update(entry)
        written += entry
    return bytes(written)


def _choose(state: xxhash.xxh64, vocab_size: int, inputs: SampleInput) -> int:
    """Greedy is the hash alone; otherwise the seed and the index count too, as in a counter-based sampler."""
    params = inputs.params
    value = state.intdigest()
    if not params.greedy:
        value ^= xxhash.xxh64_intdigest(struct.pack("<QQ", params.seed or 0, inputs.index))
    banned = inputs.eos | frozenset(params.stop_token_ids) if inputs.index < params.min_tokens else frozenset()
    token_id = value % vocab_size
    while token_id in banned and len(banned) < vocab_size:
        token_id = (token_id + 1) % vocab_size
    return token_id


def fake_tokens(
    prompt: Sequence[int],
    count: int,
    vocab_size: int = 1000,
    params: SamplingParams | None = None,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """The first `count` tokens that a FakeRunner gives for `prompt` when every block is right; ends never stop it."""
    params = params or SamplingParams(temperature=0)
    state = xxhash.xxh64()
    _extend(state, prompt)
    output: list[int] = []
    while len(output) < count:
        output.append(_choose(state, vocab_size, SampleInput(params, len(output), prompt, output, eos)))
        _extend(state, output[-1:])
    return output


class FakeCache:
    """Blocks of bytes with the two methods that transports use on a KVCache."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.data = memoryview(bytearray(num_blocks * layout.block_bytes))

    def block_bytes(self, block: int, count: int = 1) -> memoryview:
        """The bytes of this block, or of `count` from it on, writable, not a copy."""
        assert 0 <= block <= self.num_blocks - count, f"{count} from block {block} are not in [0, {self.num_blocks})"
        size = self.layout.block_bytes
        return self.data[block * size : (block + count) * size]

    def write(self, block: int, offset: int, data: bytes | memoryview) -> None:
        self.block_bytes(block)[offset : offset + len(data)] = data

    def digest(self, block: int, position: int, tokens: Sequence[int]) -> int:
        return kv_digest(self.block_bytes(block), position, tokens)

    def zero(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.block_bytes(block)[:] = bytes(self.layout.block_bytes)


class FakeRunner:
    """Same interface as ModelRunner. `step_seconds` is slept in every step, to leave room for faults."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        vocab_size: int = 1000,
        eos_token_ids: Iterable[int] = (),
        step_seconds: float = 0.0,
        layout: KvLayout | None = None,
    ) -> None:
        bytes_per_block = block_size * BYTES_PER_TOKEN
        self.layout = layout or KvLayout(b"fake", "fake", block_size, 1, 1, 1, bytes_per_block, "fake")
        assert self.layout.block_bytes == bytes_per_block, f"a fake block has {bytes_per_block} bytes"
        self.cache = FakeCache(self.layout, num_blocks)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.step_seconds = step_seconds

    def step(self, batch: Batch) -> StepOutput:
        began = time.perf_counter()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.cache.zero(batch.zero_blocks)
        states = [self._write(row) for row in batch.rows]
        return StepOutput(
            tokens=[self._token(row, state) for row, state in zip(batch.rows, states, strict=True)],
            prompt_logprobs=[self._prompt_logprobs(row) for row in batch.rows],
            digests=[self.cache.digest(ask.block, ask.position, ask.tokens) for ask in batch.digests],
            seconds=time.perf_counter() - began,
        )

    def read_block(self, block: int) -> bytes:
        return bytes(self.cache.block_bytes(block))

    def write_block(self, block: int, data: bytes) -> None:
        self.cache.block_bytes(block)[:] = data

    def _write(self, row: Row) -> xxhash.xxh64:
        """Writes the row's tokens after what its blocks hold; returns the hash of all of it as read back."""
        size = self.layout.block_size
        end = row.start + len(row.tokens)
        assert row.tokens, f"slot {row.slot} has no tokens"
        assert len(row.blocks) * size >= end, f"slot {row.slot}: {len(row.blocks)} blocks do not hold {end} tokens"
        state = xxhash.xxh64(self._read(row.blocks, row.start))
        entries = _extend(state, row.tokens)
        for position in range(row.start, end):
            offset = position % size * BYTES_PER_TOKEN
            source = (position - row.start) * BYTES_PER_TOKEN
            block = self.cache.block_bytes(row.blocks[position // size])
            block[offset : offset + BYTES_PER_TOKEN] = entries[source : source + BYTES_PER_TOKEN]
        return xxhash.xxh64(self._read(row.blocks, end))

    def _read(self, blocks: Sequence[int], positions: int) -> bytes:
        count = -(-positions // self.layout.block_size)
        return b"".join(self.cache.block_bytes(block) for block in blocks[:count])[: positions * BYTES_PER_TOKEN]

    def _token(self, row: Row, state: xxhash.xxh64) -> Token | None:
        if row.sample is None:
            return None
        token_id = _choose(state, self.vocab_size, row.sample)
        count = row.sample.params.logprobs
        return Token(row.sample.index, token_id, None if count is None else self._logprob(token_id, count))

    def _prompt_logprobs(self, row: Row) -> list[TokenLogprob]:
        count = row.prompt_logprobs
        return [] if count is None else [self._logprob(target, count) for target in row.targets]

    def _logprob(self, token_id: int, count: int) -> TokenLogprob:
        """Made up, but the right shape: the token is always the likeliest, its neighbours follow."""
        top = tuple(Candidate((token_id + i) % self.vocab_size, -0.5 - i) for i in range(count))
        return TokenLogprob(token_id, -0.5, 1, top)
