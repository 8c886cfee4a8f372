"""What a user asks for and what a step gives back: sampling parameters, tokens, finish reasons.

Standard library alone, so that the router can import it without torch. Every value checks itself when it
is made: a SamplingParams that exists is in range, on the router and again on each worker.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 16
MAX_TOKEN_ID = 2**31 - 1  # token ids are kept in int32 tensors


class InvalidField(ValueError):
    """One field of a request is wrong. `field` is its public name; str() is one sentence with the range."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class FinishReason(enum.Enum):
    """Why a request ended. Values equal the public enum's numbers."""

    STOP = 1  # an end token, a stop token or a stop string
    LENGTH = 2  # max_tokens, or the model's length
    TOOL_CALLS = 3
    CANCELLED = 4
    ERROR = 5


class Candidate(NamedTuple):
    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """Natural-log probability of a token under the model's raw distribution (before temperature and filters).

    `logprob` and `rank` are None only for the first prompt token, which nothing predicts.
    `rank` counts from 1; `top` holds the k most likely candidates, best first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[Candidate, ...] = ()


class Token(NamedTuple):
    """One generated token. `index` counts from 0 within the request, over all attempts."""

    index: int  # type: ignore[assignment]  # tuples have a method of that name
    token_id: int
    logprob: TokenLogprob | None = None


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high  # no NaN is
    if not inside:
        edge = "(" if open_low else "["
        raise InvalidField(name, f"{name} must be in {edge}{_shown(low)}, {_shown(high)}], got {_shown(value)}")


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidField(name, f"{name} must have at most {most} entries, got {count}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; the names are vLLM's.

    temperature 0 is greedy. top_k 0 keeps every token, as -1 does. `seed` None means that the router mints one.
    `max_tokens` None means as many as fit; the router resolves it before a worker sees the request.
    `logprobs` k reports the chosen token and the k best; 0 reports the chosen token alone.
    `include_stop_str_in_output` is vLLM's name of `include_stop_in_output`. `spaces_between_special_tokens` is taken
    from vLLM's users and changes nothing: no tokenizer here puts any there.
    Raises InvalidField, naming the field and its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: InitVar[bool | None] = None

    def __post_init__(self, include_stop_str_in_output: bool | None) -> None:
        if include_stop_str_in_output is not None:
            object.__setattr__(self, "include_stop_in_output", include_stop_str_in_output)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name, nothing in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, nothing)
        _check("temperature", self.temperature, 0, 10)
        _check("top_p", self.top_p, 0, 1, open_low=True)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        _check("n", self.n, 1, MAX_CHOICES)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidField(
                    "min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check(name, count, 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check_count("stop", len(self.stop), MAX_STOP_STRINGS)
        for text in self.stop:
            size = len(text.encode("utf-8", "surrogatepass"))
            if not 1 <= size <= MAX_STOP_BYTES:
                raise InvalidField("stop", f"each stop string must have 1 to {MAX_STOP_BYTES} bytes, got {size}")
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            _check("stop_token_ids", token_id, 0, MAX_TOKEN_ID)

    def _check_bias(self) -> None:
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias", token_id, 0, MAX_TOKEN_ID)
            _check("logit_bias", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
