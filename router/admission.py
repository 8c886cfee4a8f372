"""What may enter: the errors a submit can raise, and whether a request fits every worker that it may meet.

A request is checked against the model and the smallest eligible pool of BOTH stages, so that a resume, which
prefills the prompt and everything emitted, always fits wherever it lands. Nothing here counts blocks or waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from engine.types import SamplingParams
from router.workers import Role, Workers


class Rejected(Exception):
    """A request that never started. `code` names the gRPC status; str() is one sentence with the numbers."""

    code = "INTERNAL"

    def __init__(self, sentence: str, facts: Mapping[str, str] | None = None, retry_after: float = 0.0) -> None:
        super().__init__(sentence)
        self.facts = dict(facts or {})
        self.retry_after = retry_after  # seconds; 0 means no hint


class Overloaded(Rejected):
    code = "RESOURCE_EXHAUSTED"


class TooLong(Rejected):
    code = "INVALID_ARGUMENT"


class BadResume(Rejected):
    code = "INVALID_ARGUMENT"


class Closing(Rejected):
    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the router core behaves. Times are seconds."""

    max_concurrent_requests: int = 256  # placed on workers at once; more wait in the queue
    max_queued_requests: int = 1024
    credit_window: int = 64  # tokens that a client may lag behind its request
    slow_client: float = 30.0  # a client that reads nothing this long, with its window used up, is ended
    max_attempts: int = 4  # counting deaths and failed copies alone
    no_worker_grace: float = 5.0  # how long a request waits for the first worker of a role
    restart_grace: float = 30.0  # the same once such a worker was up: it is probably being restarted
    backoff_first: float = 0.05
    backoff_most: float = 2.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The most tokens, prompt and output together, that one request may have now, and who says so."""

    tokens: int
    cause: str


def limit_of(workers: Workers) -> Limit | None:
    """None until both stages have a worker: before that nothing is known."""
    if not workers.ready():
        return None
    eligible = [worker for role in Role for worker in workers.eligible(role)]
    tightest = min(eligible, key=lambda worker: worker.capacity)
    hello = tightest.hello
    if hello.max_model_len <= tightest.capacity:
        return Limit(tightest.capacity, f"the model's length of {hello.max_model_len} tokens")
    blocks = f"{hello.total_blocks} blocks of {hello.layout.block_size} tokens"
    return Limit(tightest.capacity, f"the smallest pool, {tightest.role.value} worker {tightest.address} with {blocks}")


def fit(prompt_tokens: int, resumed: int, params: SamplingParams, limit: Limit) -> SamplingParams:
    """The parameters with max_tokens set. `resumed` tokens of it are already emitted. Raises TooLong."""
    facts = {"prompt_tokens": str(prompt_tokens), "limit": str(limit.tokens)}
    wanted = params.max_tokens
    if wanted is None:
        room = limit.tokens - prompt_tokens
        if room < resumed + 1 or room < params.min_tokens:
            need = max(resumed + 1, params.min_tokens)
            facts["largest_prompt"] = str(max(0, limit.tokens - need))
            raise TooLong(
                f"the prompt has {prompt_tokens} tokens and at least {need} must follow, but {limit.cause} allows "
                f"{limit.tokens} in all; the largest prompt that fits has {facts['largest_prompt']}",
                facts,
            )
        return dataclasses.replace(params, max_tokens=room)
    if prompt_tokens + wanted > limit.tokens:
        room, largest = limit.tokens - prompt_tokens, limit.tokens - wanted
        facts |= {"max_tokens": str(wanted), "largest_prompt": str(max(0, largest))}
        fitting = [f"with this prompt max_tokens may be {room}"] if room > 0 else []
        fitting += [f"with this max_tokens the prompt may have {largest}"] if largest > 0 else []
        raise TooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, but {limit.cause} allows "
            f"{limit.tokens} in all; {', '.join(fitting) or f'neither may be more than {limit.tokens - 1}'}",
            facts,
        )
    return params


def check_queue(active: int, queued: int, config: RouterConfig) -> None:
    """Raises Overloaded when every place is taken and the queue is full. Never waits."""
    if active < config.max_concurrent_requests or queued < config.max_queued_requests:
        return
    raise Overloaded(
        f"all workers are busy: {active} running and {queued} waiting, the most that this router takes",
        {"running": str(active), "waiting": str(queued), "limit": str(config.max_queued_requests)},
        retry_after=1.0,
    )


def check_resume(resumed: int, params: SamplingParams) -> None:
    if params.max_tokens is not None and resumed >= params.max_tokens:
        raise BadResume(
            f"resume holds {resumed} tokens, but max_tokens is {params.max_tokens}: nothing is left to generate",
            {"resumed": str(resumed), "max_tokens": str(params.max_tokens)},
        )
