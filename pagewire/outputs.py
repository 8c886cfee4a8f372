"""What LLM and AsyncLLMEngine return, in the shape that vLLM's users know.

Plain values: they belong to whoever got them, and the engine never changes one that it gave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.types import TokenLogprob


@dataclass(slots=True)
class Logprob:
    """Of one token under the model's raw distribution. `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """Choice `index`. `logprobs` has one entry per token: the token itself and the best ones, by token id.

    `finish_reason` is stop, length or abort, and None until the choice ends. `stop_reason` is the stop string or the
    stop token's id that ended it; it is None where the model's own end token did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Unix times in seconds, and how long the prompt waited; each is None until it comes to that."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    first_scheduled_time: float | None = None
    last_token_time: float | None = None
    time_in_queue: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and all that was generated for it so far. `prompt` is None where token ids were given.

    `prompt_logprobs` has one entry per prompt token, and None for the first one, which nothing predicts.
    `num_cached_tokens` of the prompt were not computed again; it is None until the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


def by_token(report: TokenLogprob, decode: Callable[[Sequence[int]], str]) -> dict[int, Logprob]:
    """The token that was chosen comes first, whatever its rank."""
    found = {}
    if report.logprob is not None:
        found[report.token_id] = Logprob(report.logprob, report.rank, decode([report.token_id]))
    for rank, candidate in enumerate(report.top, 1):
        if candidate.token_id not in found:
            found[candidate.token_id] = Logprob(candidate.logprob, rank, decode([candidate.token_id]))
    return found
