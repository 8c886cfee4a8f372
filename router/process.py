"""The router's process, from its first line to its exit code.

The ports are open and the process answers its health check before anything heavy is imported: alive at once, ready
when the model's text and a worker of each stage are there. A mistake of the user ends it with one sentence and exit
code 2. The first signal drains, the second ends at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from router import border
from router.config import CannotServe, Settings, parse
from wire.channel import open_server
from wire.flags import BadOption
from wire.health import Health
from wire.ports import PortTaken, at, bind, check_free, listen
from wire.security import InsecureAddress

FLUSH_S = 2.0  # how long streams may take to send their last messages
_PR_SET_PDEATHSIG = 1
_THE_REST = ("wire.logs", "router.assembly")  # all that is heavy


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    try:
        settings = parse(sys.argv[1:] if argv is None else argv, os.environ)
        if settings.exit_with_parent and not _exit_with_parent():
            return 0
        uvloop.run(_run(settings, began))
    except (BadOption, CannotServe, PortTaken, InsecureAddress) as error:
        print(f"pagewire router: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        # The border of the process: the log has the traceback, the user gets a sentence.
        from wire.logs import get_logger

        get_logger("router").exception("router_broke")
        print(f"pagewire router: internal error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _exit_with_parent() -> bool:
    """The kernel sends SIGTERM when the parent dies, however it dies. False if it is gone already."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


async def _run(settings: Settings, began: float) -> None:
    stop = asyncio.Event()
    _on_signals(stop)
    late: list[Any] = []
    http = listen(settings.host, settings.http_port, settings.security)  # before anything else: a taken port ends it
    server = open_server(settings.security, internal=False)
    health = Health(server, [border.SERVICE])
    border.add_to_server(lambda: late[0] if late else None, server)
    check_free(settings.host, settings.port)  # gRPC's own complaint would come before our sentence
    port = bind(server, settings.host, settings.port, settings.security)
    await server.start()
    await health.start()
    _say(f"HTTP on {at(settings.host, http.getsockname()[1])}")
    _say(f"alive on {at(settings.host, port)} after {time.monotonic() - began:.1f} s")
    try:
        logs, assembly = [await asyncio.to_thread(importlib.import_module, name) for name in _THE_REST]
        logs.configure("router", settings.log_level)
        spans = await asyncio.to_thread(assembly.tracing.start, os.environ, "router", f"router-{settings.port}")
        router = assembly.Router(settings, health, http, _say, spans)
        late.append(router.service)
        await router.run(stop)
    finally:
        http.close()
        await server.stop(FLUSH_S)
    _say("stopped")


def _on_signals(stop: asyncio.Event) -> None:
    def on_signal(number: int) -> None:
        if stop.is_set():
            sys.stdout.flush()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def _say(line: str) -> None:
    try:
        print(f"router: {line}", flush=True)
    except OSError:  # whoever read this is gone: a drain goes on without an audience
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
