"""One step of a model: a Batch in, tokens and digests out. Runs on the device thread and blocks it.

Orders the rows as the backend wants them (decode rows first) and puts the results back in the batch's order.
Computes logits only for rows that sample or report prompt log probabilities. Owns model and cache; allocates no block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backend import Backend, RowSpan
from engine.batch import Batch, Row, StepOutput
from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.sampler import prompt_logprobs, sample
from engine.types import Token, TokenLogprob

_LOGIT_ROWS = 256  # prompt log probabilities are computed in pieces: a row of logits has the vocabulary's width


class ModelRunner:
    """Not thread-safe: one thread calls step()."""

    def __init__(self, model: Llama, config: EngineConfig, cache: KVCache, backend: Backend) -> None:
        self.model = model
        self.config = config
        self.cache = cache
        self.layout = cache.layout
        self.backend = backend
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = model.config.eos_token_ids
        self._rope_table = backend.rope_table(model.config, config.max_model_len)

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepOutput:
        began = time.perf_counter()
        self.cache.zero(batch.zero_blocks)
        tokens: list[Token | None] = [None] * len(batch.rows)
        reports: list[list[TokenLogprob]] = [[] for _ in batch.rows]
        if batch.rows:
            self._run(batch.rows, tokens, reports)
        digests = [self.cache.digest(ask.block, ask.position, ask.tokens) for ask in batch.digests]
        return StepOutput(tokens, reports, digests, time.perf_counter() - began)

    def _run(self, rows: Sequence[Row], tokens: list[Token | None], reports: list[list[TokenLogprob]]) -> None:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens) > 1, len(rows[i].blocks)))
        spans = [self._span(rows[i]) for i in order]
        plan = self.backend.plan(spans, self._rope_table, self.model.config, self.cache)
        hidden = self.model.forward(plan, self.cache, self.backend, self.config.row_tile)
        first = 0
        sampling: list[int] = []
        lasts: list[int] = []
        for i in order:
            row = rows[i]
            if row.prompt_logprobs is not None:
                reports[i] = self._prompt_logprobs(row, hidden[first : first + len(row.targets)], row.prompt_logprobs)
            first += len(row.tokens)
            if row.sample is not None:
                sampling.append(i)
                lasts.append(first - 1)
        if sampling:
            logits = self._logits(hidden[torch.tensor(lasts)])
            inputs = [one for i in sampling if (one := rows[i].sample) is not None]
            for i, token in zip(sampling, sample(logits, inputs), strict=True):
                tokens[i] = token

    def _span(self, row: Row) -> RowSpan:
        end = row.start + len(row.tokens)
        capacity = len(row.blocks) * self.layout.block_size
        assert row.tokens, f"slot {row.slot} has no tokens"
        assert end <= capacity, f"slot {row.slot}: {len(row.blocks)} blocks hold {capacity} tokens, not {end}"
        assert end <= self.config.max_model_len, f"slot {row.slot}: {end} tokens, at most {self.config.max_model_len}"
        return RowSpan(row.tokens, row.start, row.blocks)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden, self.backend, self.config.row_tile)

    def _prompt_logprobs(self, row: Row, hidden: Tensor, count: int) -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        for first in range(0, len(row.targets), _LOGIT_ROWS):
            piece = slice(first, first + _LOGIT_ROWS)
            found += prompt_logprobs(self._logits(hidden[piece]), row.targets[piece], count)
        return found
