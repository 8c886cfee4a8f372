"""Every way in which a call can end badly, as one exception, and how it becomes a gRPC status.

A status carries one sentence for a person and google.rpc details for a program: BadRequest names the field,
RetryInfo says when to come back, ErrorInfo has the reason and the numbers. No traceback and no text of another
library ever leaves the process: what nobody foresaw is INTERNAL with an id that the log explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from router.actions import Outcome
from router.admission import Rejected
from wire.codec import to_duration
from wire.errors import sentence as reason_sentence

DOMAIN = "pagewire"
DETAILS_KEY = "grpc-status-details-bin"
MAX_SENTENCE = 1000  # bytes; a status travels in a header, with each byte that is not ASCII as three characters
MAX_FACTS = 24
MAX_FACT = 200  # bytes
MAX_ALL_FACTS = 1000  # bytes; a client refuses headers beyond 8 KiB, and then learns nothing at all


class RequestError(Exception):
    """`code` names the gRPC status, str() is the sentence, `field` the request's field that is wrong, if one is."""

    def __init__(
        self,
        code: str,
        sentence: str,
        *,
        field: str = "",
        reason: str = "",
        facts: Mapping[str, str] | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(sentence)
        self.code = code
        self.field = field
        self.reason = reason or code
        self.facts = dict(facts or {})
        self.retry_after = retry_after  # seconds; 0 gives no hint

    @classmethod
    def from_rejected(cls, rejected: Rejected) -> RequestError:
        return cls(
            rejected.code,
            str(rejected),
            reason=type(rejected).__name__.upper(),
            facts=rejected.facts,
            retry_after=rejected.retry_after,
        )

    @classmethod
    def from_outcome(cls, outcome: Outcome) -> RequestError:
        reason = outcome.reason
        text = outcome.sentence or (reason_sentence(reason, outcome.facts) if reason else "the request failed")
        retry = 1.0 if outcome.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") else 0.0
        return cls(outcome.code, text, reason=reason.name if reason else "", facts=outcome.facts, retry_after=retry)


async def abort(
    context: grpc.aio.ServicerContext, error: RequestError, more: Sequence[tuple[str, str]] = ()
) -> NoReturn:
    """Ends the call with the error's status; `more` are trailers beside it."""
    code = grpc.StatusCode[error.code]
    text = _clipped(str(error), MAX_SENTENCE)
    status = status_pb2.Status(code=code.value[0], message=text, details=map(_packed, _details(error)))
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString()), *more]
    if error.retry_after:
        trailers.append(("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))))
    await context.abort(code, text, tuple(trailers))


def _details(error: RequestError) -> Sequence[Message]:
    facts: dict[str, str] = {}
    room = MAX_ALL_FACTS
    for name, value in list(error.facts.items())[:MAX_FACTS]:
        fact = _clipped(value, MAX_FACT)
        room -= len(name.encode()) + len(fact.encode())
        if room < 0:
            break
        facts[name] = fact
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_clipped(str(error), MAX_SENTENCE)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after:
        details.append(error_details_pb2.RetryInfo(retry_delay=to_duration(error.retry_after)))
    return details


def _clipped(text: str, most: int) -> str:
    """At most so many bytes, no half character. Half a surrogate pair, which JSON can spell, becomes "?"."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
