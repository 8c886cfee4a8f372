"""What a client gets back, as plain values: answers, their parts, what a server says of itself, and the one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.messages import KvPath
from engine.types import FinishReason, TokenLogprob


class PagewireError(Exception):
    """Whatever went wrong: str() is one sentence for a person.

    `code` names the gRPC status, `field` the request's field that is wrong, `retry_after` the seconds after which
    a new try makes sense (None: no hint). `facts` are the numbers of the sentence.
    """

    def __init__(
        self,
        code: str,
        sentence: str,
        field: str | None = None,
        retry_after: float | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.field = field
        self.retry_after = retry_after
        self.facts = dict(facts or {})


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_prompt_tokens` of the prompt were not computed again."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds in each stage, as the server measured them."""

    queue: float = 0.0
    prefill: float = 0.0
    kv_transfer: float = 0.0
    decode: float = 0.0
    time_to_first_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of choice `index`; in a Result, all of it. Each part is empty unless it was asked for.

    `finish_reason` is None until the choice ends. `stop` is the stop string or the stop token's id that ended it.
    """

    index: int = 0
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A complete answer. The properties are those of its first choice."""

    request_id: str
    model: str
    choices: Sequence[Delta]
    usage: Usage
    timing: Timing
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Started:
    """The head of a stream. With `seed` and the token ids received, another request can resume the answer."""

    request_id: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    seed: int = 0
    prompt_logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    root: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the router sees it. `reason` says why it takes no work, where it is not `accepting`."""

    role: str
    address: str
    accepting: bool
    reason: str
    dtype: str
    block_size: int
    block_bytes: int
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    running: int
    waiting: int
    pulled_blocks: int
    transports: Sequence[str] = ()
    kv_path: str = ""  # how blocks came from other workers; empty until the first
    kv_paths: Sequence[KvPath] = ()  # of a decode worker: how they come from each prefill worker


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    uptime: float
    prefill_workers: int
    decode_workers: int
    workers: Sequence[WorkerStatus] = field(default_factory=tuple)
