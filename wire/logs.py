"""Structured logs: readable lines on a terminal, JSON elsewhere. Configured once per process, in __main__.

Every line has the time, the level and the role; within a request's task it has the request's id too. What libraries
log comes out in the same shape. No prompt and no generated text is ever logged.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

MAX_REQUEST_ID = 256  # characters; a longer one is refused, and the line that says so is no longer for it


def configure(role: str, level: str = "info") -> None:
    """Of libraries only warnings and errors are shown."""

    def add_role(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["role"] = role
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if sys.stderr.isatty():
        last = [printable, structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    foreign = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=foreign, foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name]
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def about(request_id: str) -> None:
    """What this task logs from now on concerns this request."""
    structlog.contextvars.bind_contextvars(request_id=request_id[:MAX_REQUEST_ID])


def printable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """What a client named itself moves no terminal's cursor and begins no line of its own. JSON does that by itself."""
    shown = {name: ascii(value) for name, value in event.items() if isinstance(value, str) and _odd(name, value)}
    event.update(shown)
    return event


def _odd(name: str, value: str) -> bool:
    return name not in ("event", "exception", "stack") and not value.isprintable()


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    return structlog.get_logger(component=name)
