"""Structured logs: readable lines on a terminal, JSON elsewhere. Configured once per process, in __main__."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(role: str, level: str = "info") -> None:
    """Every line carries the role and the time; gRPC's own logger speaks only of errors."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    console = sys.stderr.isatty()
    last = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    processors = [step for step in shared if not (console and step is structlog.processors.format_exc_info)]
    structlog.configure(
        processors=[*processors, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    return structlog.get_logger(component=name)
