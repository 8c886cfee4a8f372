"""OpenTelemetry spans of one process, and the W3C trace context that travels with a request.

Off unless the environment names an exporter (OTEL_EXPORTER_OTLP_ENDPOINT and its like); then the SDK reads all other
OTEL_* variables itself. Spans leave by the SDK's own thread. Times are time.monotonic()'s, as everywhere here. No
prompt and no generated text is ever an attribute.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wire.logs import get_logger
from wire.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

log = get_logger("tracing")

LOOK_S = 60.0  # how often the difference of the clocks is looked up
FLUSH_S = 2.0  # how long the last spans may take to leave
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TRACESTATE = 512

Attributes = Mapping[str, str | int | float | bool | list[str]]


class Incoming(NamedTuple):
    """What a caller sent along; empty where it sent nothing of use."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of(cls, traceparent: str | None, tracestate: str | None) -> Incoming:
        if not traceparent or not _TRACEPARENT.fullmatch(traceparent):
            return NOTHING
        return cls(traceparent, (tracestate or "")[:_MAX_TRACESTATE])


NOTHING = Incoming()


class Span(Protocol):
    """One that is open. `traceparent` is what its children need."""

    @property
    def traceparent(self) -> str: ...

    def end(self, attributes: Attributes, error: str = "") -> None: ...


class Tracing(Protocol):
    on: bool

    def begin(self, name: str, incoming: Incoming, attributes: Attributes) -> Span:
        """A server span, from now on."""

    def record(
        self, name: str, parent: str, began: float, ended: float, attributes: Attributes, error: str = ""
    ) -> str:
        """A span that is over, under the parent's traceparent. Returns its own."""

    async def close(self) -> None:
        """Sends what is left."""


class _NoSpan(NamedTuple):
    traceparent: str

    def end(self, attributes: Attributes, error: str = "") -> None:
        pass


class Off:
    """Passes a caller's context on and does nothing else."""

    on = False

    def begin(self, name: str, incoming: Incoming, attributes: Attributes) -> Span:
        return _NoSpan(incoming.traceparent)

    def record(
        self, name: str, parent: str, began: float, ended: float, attributes: Attributes, error: str = ""
    ) -> str:
        return parent

    async def close(self) -> None:
        pass


OFF = Off()


def start(environ: Mapping[str, str], role: str, name: str) -> Tracing:
    """`name` tells this process from others of its role. What keeps tracing off although it was asked for is logged."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    wanted = exporter or any(environ.get(variable) for variable in _ENDPOINTS)
    if not wanted or exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return OFF
    if exporter not in ("", "otlp", "console"):
        log.warning("tracing_off", why=f"OTEL_TRACES_EXPORTER is {exporter!r}: otlp, console and none are known")
        return OFF
    try:
        return Spans(_provider(exporter, _protocol(environ), role, name))
    except ModuleNotFoundError as error:
        log.warning("tracing_off", why=f"pip install 'pagewire[otel]' for tracing: there is no {error.name}")
    except ValueError as error:  # a variable that the SDK cannot read
        log.warning("tracing_off", why=str(error))
    return OFF


def _protocol(environ: Mapping[str, str]) -> str:
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return (named or "grpc").strip().lower()


def _provider(exporter: str, protocol: str, role: str, name: str) -> TracerProvider:
    """The environment's resource attributes and service name win over ours."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = {
        "service.name": f"pagewire-{role}",
        "service.instance.id": name,
        "service.version": VERSION,
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporter, protocol)))
    return provider


def _exporter(exporter: str, protocol: str) -> SpanExporter:
    if exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp()
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: grpc and http/protobuf are known")


class Spans:
    """Those of a provider, which it owns."""

    on = True

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pagewire", VERSION)
        self._looked_at, self._difference = -math.inf, 0.0

    def begin(self, name: str, incoming: Incoming, attributes: Attributes) -> Span:
        from opentelemetry.trace import SpanKind

        began = self._wall(time.monotonic())
        span = self._tracer.start_span(
            name, _context(incoming), SpanKind.SERVER, attributes=dict(attributes), start_time=began
        )
        return _OpenSpan(span, self._wall)

    def record(
        self, name: str, parent: str, began: float, ended: float, attributes: Attributes, error: str = ""
    ) -> str:
        start = self._wall(began)
        span = self._tracer.start_span(
            name, _context(Incoming.of(parent, None)), attributes=dict(attributes), start_time=start
        )
        _fail(span, error)
        span.end(max(start, self._wall(ended)))
        return _traceparent(span)

    def _wall(self, at: float) -> int:
        """Nanoseconds of the wall clock. Spans of one trace see one difference of the clocks, looked up each minute."""
        if (now := time.monotonic()) - self._looked_at > LOOK_S:
            self._looked_at = now
            self._difference = time.time() - now
        return round((at + self._difference) * 1e9)

    async def close(self) -> None:
        """The exporter may wait for a collector that is not there: whoever ends does not wait with it, nor for its
        thread."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is over, since nobody waited so long
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), FLUSH_S)


class _OpenSpan:
    def __init__(self, span: OtelSpan, wall: Callable[[float], int]) -> None:
        self._span = span
        self._wall = wall
        self.traceparent = _traceparent(span)

    def end(self, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        _fail(self._span, error)
        self._span.end(self._wall(time.monotonic()))


def _fail(span: OtelSpan, error: str) -> None:
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))


def _context(incoming: Incoming) -> Context:
    """Never the context of the task that happens to run: a parent is named or there is none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not incoming.traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract(incoming._asdict(), Context())


def _traceparent(span: OtelSpan) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
