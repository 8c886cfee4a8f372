"""Between the gRPC server and the service: what every call of the public API goes through.

Reads the request's bytes without letting a bad one become INTERNAL, gives every request a name, which comes back in the
trailers and is in each log line, gives a RequestError its status and details, and turns what nobody foresaw into
INTERNAL with an id, under which the log has the traceback. Knows nothing else of a request.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from protos import generation_pb2, generation_pb2_grpc
from router.status import RequestError, abort

REQUEST_ID = "x-request-id"
MAX_ECHO = 256  # characters of a name that is too long for a request, in the refusal that says so
GENERATING = frozenset({"Generate", "GenerateStream"})
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


class _Unreadable:
    """Stands in for a request that could not be read."""

    def __init__(self, name: str) -> None:
        self.sentence = f"the request is no {name}, or one of its text fields is not valid UTF-8"


def add_to_server(
    service_of: Callable[[], generation_pb2_grpc.GenerationServiceServicer | None], server: grpc.aio.Server
) -> None:
    """As the generated function of that name, with the border around each handler.

    `service_of` gives None as long as the process is starting.
    """
    methods = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods
    handlers = {}
    for method in methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        request: type[Message] = getattr(generation_pb2, method.input_type.name)
        response: type[Message] = getattr(generation_pb2, method.output_type.name)
        handlers[method.name] = make(
            _bordered(service_of, method.name),
            request_deserializer=_reader(request),
            response_serializer=response.SerializeToString,
        )
    server.add_registered_method_handlers(SERVICE, handlers)


def _reader(kind: type[Message]) -> Callable[[bytes], Message | _Unreadable]:
    def read(data: bytes) -> Message | _Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return _Unreadable(kind.DESCRIPTOR.name)

    return read


def _bordered(service_of: Callable[[], Any], name: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        trailers = _name(request, context)
        try:
            service = service_of()
            if isinstance(request, _Unreadable):
                if service is not None and name in GENERATING:
                    service.unreadable()
                raise RequestError("INVALID_ARGUMENT", request.sentence, reason="UNREADABLE")
            if service is None:
                raise RequestError("UNAVAILABLE", "the router is starting: try again in a second", retry_after=1.0)
            return await _guarded(getattr(service, name), name, request, context)
        except RequestError as error:
            await abort(context, error, trailers)

    return call


def incoming(context: grpc.aio.ServicerContext) -> Any:
    """The trace that the caller's span belongs to."""
    from wire.tracing import Incoming

    sent = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Incoming.of(sent.get("traceparent"), sent.get("tracestate"))


def _name(request: Any, context: grpc.aio.ServicerContext) -> tuple[tuple[str, str], ...]:
    """The client's own name for it, in the message or as metadata, or a new one. Returns the trailers that tell it."""
    inner = getattr(request, "request", request)
    if not isinstance(inner, generation_pb2.GenerateRequest):
        return ()
    if not inner.request_id:
        sent = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
        inner.request_id = sent if isinstance(sent, str) and sent else uuid.uuid4().hex
    from wire.logs import about

    about(inner.request_id)
    if not (inner.request_id.isascii() and inner.request_id.isprintable() and len(inner.request_id) <= MAX_ECHO):
        return ()
    trailers = ((REQUEST_ID, inner.request_id),)
    context.set_trailing_metadata(trailers)
    return trailers


async def _guarded(
    handler: Callable[[Any, grpc.aio.ServicerContext], Any], name: str, request: Any, context: grpc.aio.ServicerContext
) -> Any:
    try:
        return await handler(request, context)
    except (RequestError, grpc.aio.BaseError):
        raise
    except Exception as error:
        raise internal_error(name) from error


def internal_error(name: str) -> RequestError:
    """For the exception that is being handled, which nobody foresaw: the log has it, the client gets its id."""
    from wire.logs import get_logger  # a fifth of the time in which the process has to be alive

    error_id = secrets.token_hex(8)
    get_logger("border").exception("call_broke", method=name, error_id=error_id)
    return RequestError(
        "INTERNAL",
        f"an internal error ended the request; the router's log has it under the id {error_id}",
        facts={"error_id": error_id},
    )
