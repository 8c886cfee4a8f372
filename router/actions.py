"""What the front says to the router core and what the core answers, as plain values.

The core never performs an action: the driver (the servicer, or the simulator) sends every ToWorker on the
session of that worker, hands Emit to the client's stream and closes it at End. There is exactly one End per
request, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.messages import DecodeCommand, PrefillCommand, Reason
from engine.types import FinishReason, SamplingParams, Token, TokenLogprob
from router.workers import Role


@dataclass(frozen=True, slots=True)
class RouterRequest:
    """What the front asks for. `resume` are output tokens that the client already holds; max_tokens counts them."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    deadline: float  # seconds left
    namespace: bytes = b""
    resume: Sequence[int] = ()
    request_id: str = ""  # for the workers' logs and traces, as is `traceparent`
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per stage; worker times add up over attempts. `first_token` is from submit, None if none came."""

    queued: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queued: float = 0.0
    decode: float = 0.0
    first_token: float | None = None
    placed: float = 0.0  # from submit to the first PrefillStart


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `code` is a gRPC status name; anything but OK comes with one sentence."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int  # everything in the log, resumed tokens included
    cached_tokens: int
    times: Times
    stop_token_id: int | None = None
    code: str = "OK"
    sentence: str = ""
    reason: Reason | None = None  # the worker's, if one refused or failed it for good
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToWorker:
    address: str
    role: Role
    command: PrefillCommand | DecodeCommand


class Emit(NamedTuple):
    """A tuple, since there is one for every token."""

    request: int
    tokens: Sequence[Token]
    prompt_logprobs: Sequence[TokenLogprob] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class End:
    request: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A copy from `prefill` to `decode` failed. From a flow to its dispatcher, which counts it; no driver sees it."""

    prefill: str
    decode: str


Action = ToWorker | Emit | End
FlowAction = Action | LinkFailed
