"""Which prompts are computed, in which order, and how they are cut into steps. Plain Python over ints and lists.

Owns the queue (oldest request first), the slots and the block tables of prompts that are being filled. A job is
admitted only when its whole prompt fits, so a prompt that has begun never waits for a block. The oldest waiting
job is never passed by a younger one. Knows nothing of sessions, tickets, messages or time.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.batch import Batch, DigestRequest, Row, SampleInput, StepOutput
from engine.blocks import BlockPool, BlockTable, num_blocks_for
from engine.config import EngineConfig
from engine.messages import BlockHandle, PrefillStart, RequestKey
from engine.prefix_cache import reusable
from engine.types import Token, TokenLogprob


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt that waits. Times are on the worker's monotonic clock, in seconds."""

    session: int
    start: PrefillStart
    hashes: Sequence[bytes]  # chain digests of the prompt's full blocks
    arrived: float
    age_start: float  # when the client's call began: the order of service
    deadline_at: float

    @property
    def key(self) -> tuple[int, RequestKey]:
        return self.session, self.start.key

    @property
    def num_tokens(self) -> int:
        return len(self.start.token_ids)

    @property
    def last_token(self) -> bool:
        """Token 0 ends the request: nobody needs the blocks afterwards, and the router places no decode."""
        return self.start.emitted + 1 == self.start.params.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """After a resume the client has them already: they came with token 0."""
        return self.start.params.prompt_logprobs is not None and self.start.emitted == 0


@dataclass(slots=True, eq=False)
class Filling:
    """A prompt with all its blocks. Positions below `done` are computed, those below `launched` are at least in a step
    in flight; `reused` blocks came from the cache.
    """

    job: PrefillJob
    ticket: int
    table: BlockTable
    slot: int
    reused: int
    done: int
    launched: int
    admitted: float
    unzeroed: list[int]  # taken from the pool and not yet zeroed
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.job.num_tokens - self.done

    @property
    def not_launched(self) -> int:
        return self.job.num_tokens - self.launched


@dataclass(slots=True, eq=False)
class Chunk:
    """What one step does for one prompt: `count` tokens, after which the blocks at `sealing` are sealed."""

    filling: Filling
    count: int
    sealing: range


@dataclass(slots=True, eq=False)
class Progress:
    """What a step has done for one prompt. `token` is set with the prompt's last chunk."""

    filling: Filling
    sealed: list[BlockHandle]
    token: Token | None


class PrefillScheduler:
    """`digests` False: nobody checks copied bytes (the local transport copies none), so none are computed.

    `depth` steps may be in flight: the device works on the next one while the last one is reported.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        eos_token_ids: Collection[int],
        *,
        digests: bool = True,
        depth: int = 1,
    ) -> None:
        self.pool = pool
        self.config = config
        self.waiting: list[PrefillJob] = []  # oldest first
        self.filling: list[Filling] = []  # oldest first
        self.flights: deque[list[Chunk]] = deque()  # the batches that the device works on, the oldest first
        self._depth = depth
        self._eos = frozenset(eos_token_ids)
        self._with_digests = digests
        self._digests: dict[int, tuple[int, int]] = {}  # block -> (generation, digest) when it was sealed
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    # ---- waiting ----------------------------------------------------------------------------------------------

    def enqueue(self, job: PrefillJob) -> None:
        bisect.insort(self.waiting, job, key=lambda each: each.age_start)

    def admit(self, ticket: int, now: float, promised: int = 0) -> Filling | None:
        """Moves the oldest waiting job to filling if its whole prompt fits beside `promised` blocks, else None."""
        if not self.waiting or not self._free_slots:
            return None
        job = self.waiting[0]
        reused = self._reusable(job)
        self.pool.share(reused)  # before they are counted: what we count on must not be evicted
        needed = num_blocks_for(job.num_tokens, self.config.block_size) - len(reused)
        if needed > self.pool.available - promised:
            self.pool.give(reused)
            return None
        new = self.pool.take(needed)
        del self.waiting[0]
        size = self.config.block_size
        filling = Filling(
            job=job,
            ticket=ticket,
            table=BlockTable(reused + new, size),
            slot=self._free_slots.pop(),
            reused=len(reused),
            done=len(reused) * size,
            launched=len(reused) * size,
            admitted=now,
            unzeroed=new,
        )
        bisect.insort(self.filling, filling, key=lambda each: each.job.age_start)
        return filling

    def _reusable(self, job: PrefillJob) -> list[int]:
        if job.wants_prompt_logprobs:  # they need the logits of every position
            return []
        blocks = reusable(self.pool, job.hashes, job.num_tokens, self.config.block_size)
        if self._with_digests:  # a block of unknown digest cannot be announced
            known = (i for i, block in enumerate(blocks) if self._known_digest(block) is None)
            blocks = blocks[: next(known, len(blocks))]
        return blocks

    def _known_digest(self, block: int) -> int | None:
        generation, digest = self._digests.get(block, (-1, 0))
        return digest if generation == self.pool.generation(block) else None

    # ---- filling ----------------------------------------------------------------------------------------------

    def next_batch(self, budget: int | None = None) -> Batch | None:
        """Packs chunks of the oldest prompts under the token budget, which the caller may lower. None while `depth`
        batches are in flight."""
        if len(self.flights) >= self._depth:
            return None
        batch, chunks = Batch(), list[Chunk]()
        budget = min(budget or self.config.max_num_batched_tokens, self.config.max_num_batched_tokens)
        for filling in self.filling:
            if budget == 0:
                break
            if not filling.not_launched:
                continue
            chunk = self._chunk(filling, min(budget, filling.not_launched))
            budget -= chunk.count
            chunks.append(chunk)
            batch.rows.append(self._row(chunk))
            batch.zero_blocks += filling.unzeroed
            filling.unzeroed = []
            if self._with_digests:
                batch.digests += self._digest_requests(chunk)
            filling.launched += chunk.count
        if not chunks:
            return None
        self.flights.append(chunks)
        return batch

    def _chunk(self, filling: Filling, count: int) -> Chunk:
        size = self.config.block_size
        first = filling.launched
        ends = count == filling.not_launched  # the partial last block is sealed when the prompt ends
        after = num_blocks_for(first + count, size) if ends else (first + count) // size
        return Chunk(filling, count, range(first // size, after))

    def _row(self, chunk: Chunk) -> Row:
        filling, start = chunk.filling, chunk.filling.job.start
        first, end = filling.launched, filling.launched + chunk.count
        row = Row(filling.slot, start.token_ids[first:end], first, filling.table.blocks)
        if filling.job.wants_prompt_logprobs:
            row.prompt_logprobs = start.params.prompt_logprobs
            row.targets = start.token_ids[first + 1 : end + 1]
        if chunk.count == filling.not_launched:
            split = filling.job.num_tokens - start.emitted
            row.sample = SampleInput(
                start.params, start.emitted, start.token_ids[:split], start.token_ids[split:], self._eos
            )
        return row

    def _digest_requests(self, chunk: Chunk) -> list[DigestRequest]:
        blocks, tokens, size = chunk.filling.table.blocks, chunk.filling.job.start.token_ids, self.config.block_size
        return [DigestRequest(blocks[p], p, tokens[p * size : (p + 1) * size]) for p in chunk.sealing]

    def finish(self, output: StepOutput) -> list[Progress]:
        """The step has ended. A prompt whose last chunk this was leaves; its table stays with whoever has its ticket.

        Prompts that were dropped while the step ran are in the result too: their blocks may go back now.
        """
        chunks = self.flights.popleft()
        digests = iter(output.digests)
        result = []
        for chunk, token, logprobs in zip(chunks, output.tokens, output.prompt_logprobs, strict=True):
            filling = chunk.filling
            filling.done += chunk.count
            filling.prompt_logprobs += logprobs
            sealed = [self._seal(filling, p, next(digests) if self._with_digests else 0) for p in chunk.sealing]
            if not filling.remaining:
                self.drop(filling)
            result.append(Progress(filling, sealed, token))
        return result

    def abandon(self) -> list[Filling]:
        """A step has failed: what its prompts' blocks hold is unknown. They leave, without a name in the cache."""
        fillings = list(dict.fromkeys(chunk.filling for chunks in self.flights for chunk in chunks))
        self.flights.clear()
        for filling in fillings:
            self.drop(filling)
        return fillings

    def _seal(self, filling: Filling, position: int, digest: int) -> BlockHandle:
        block = filling.table.blocks[position]
        if self._with_digests:
            self._digests[block] = (self.pool.generation(block), digest)
        if position < len(filling.job.hashes):  # a full block: others may share it from now on
            self.pool.name(block, filling.job.hashes[position])
        return self.handle(filling, position, digest)

    def handle(self, filling: Filling, position: int, digest: int) -> BlockHandle:
        block = filling.table.blocks[position]
        return BlockHandle(block, self.pool.generation(block), position, digest)

    def reused_handles(self, filling: Filling) -> list[BlockHandle]:
        """Handles of the blocks that came from the cache, sealed before the prompt began."""
        blocks, generation = filling.table.blocks[: filling.reused], self.pool.generation
        digests = [self._known_digest(block) or 0 for block in blocks] if self._with_digests else [0] * len(blocks)
        return [BlockHandle(block, generation(block), p, digests[p]) for p, block in enumerate(blocks)]

    def drop(self, filling: Filling) -> None:
        """The prompt leaves; does nothing if it has left. A step in flight may still write into its blocks."""
        if filling in self.filling:
            self.filling.remove(filling)
            self._free_slots.append(filling.slot)

    def is_in_flight(self, ticket: int) -> bool:
        return any(chunk.filling.ticket == ticket for chunks in self.flights for chunk in chunks)

    @property
    def waiting_tokens(self) -> int:
        return sum(job.num_tokens for job in self.waiting) + sum(filling.remaining for filling in self.filling)
