"""What a scheduler hands to a runner for one step, and what it gets back: plain values, standard library alone.

A Batch mixes prefill chunks and decode rows: a row is "these new tokens of one sequence, starting at this
position, with this block table", and a decode row is a chunk of one token. Rows own nothing: the blocks belong
to the tables and tickets of the scheduler, which must keep them until the step has ended. A batch is the runner's
until it has given the step's output: then its rows may be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.types import SamplingParams, Token, TokenLogprob


@dataclass(slots=True)
class SampleInput:
    """Everything, besides the logits, on which token `index` depends: no sampler keeps state between steps.

    `prompt` is the client's original prompt and `output` the tokens emitted since, over all attempts: `index` of them,
    less those of steps in flight. Ids in `eos`, and params.stop_token_ids, cannot be sampled while index < min_tokens.
    """

    params: SamplingParams
    index: int
    prompt: Sequence[int]
    output: Sequence[int]
    eos: frozenset[int] = frozenset()


@dataclass(slots=True)
class Row:
    """New tokens of one sequence; none where the newest is that of a step in flight, which only the runner knows.
    `blocks` covers their positions, from `start` on.

    `slot` is a small id, stable while the sequence stays in the engine. `sample` is None for a chunk that is not
    the prompt's last. `prompt_logprobs` k asks for the log probability of each of `targets`, where targets[i] is
    the token after tokens[i]; a prompt's last token has none, so `targets` may be one shorter than `tokens`.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: SampleInput | None = None
    prompt_logprobs: int | None = None
    targets: Sequence[int] = ()


@dataclass(slots=True)
class DigestRequest:
    """Digest `block`, which holds `tokens` from logical block index `position` of a sequence."""

    block: int
    position: int
    tokens: Sequence[int]


@dataclass(slots=True)
class Batch:
    """`zero_blocks` changed tenant and are zeroed before the step; `digests` are computed after it."""

    rows: list[Row] = field(default_factory=list)
    zero_blocks: list[int] = field(default_factory=list)
    digests: list[DigestRequest] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(slots=True)
class StepOutput:
    """One entry per row, in the batch's order, and one digest per DigestRequest. `seconds` is the step's duration."""

    tokens: list[Token | None]
    prompt_logprobs: Sequence[Sequence[TokenLogprob]]
    digests: list[int]
    seconds: float
