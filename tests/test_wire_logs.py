"""What a line of the log may hold of what a client wrote."""

from __future__ import annotations

import contextvars

from structlog.contextvars import get_contextvars
from structlog.dev import ConsoleRenderer

from wire.logs import MAX_REQUEST_ID, about, printable


def test_a_clients_own_name_neither_moves_the_terminals_cursor_nor_begins_a_line() -> None:
    named = {"event": "request_ended", "request_id": "mine\n2026 [error] all is lost \x1b[2J\x9b2J", "how": "stop"}
    shown = ConsoleRenderer(colors=False)(None, "info", printable(None, "info", dict(named)))
    assert isinstance(shown, str) and shown.isprintable(), repr(shown)
    assert "all is lost" in shown and "how=stop" in shown
    traceback = {"event": "call_broke", "exception": "Traceback\n  here"}
    assert printable(None, "error", dict(traceback)) == traceback


def test_a_clients_own_name_fills_no_log() -> None:
    def bound() -> str:
        about("x" * 10**6)
        return str(get_contextvars()["request_id"])

    assert contextvars.copy_context().run(bound) == "x" * MAX_REQUEST_ID
