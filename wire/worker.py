"""One worker process from its first line to its exit code: port, health, signals, drain. No torch, no engine.

The order is fixed: flags, threads, port, alive, model, ready, work, drain, exit. A mistake of the user ends it with
one sentence and exit code 2. Owns the server and the process; the Stage owns everything that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, Protocol

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from wire import logs, metrics, tracing
from wire.channel import open_server
from wire.flags import BadOption
from wire.health import Health
from wire.options import Role, WorkerOptions, parse
from wire.ports import PortTaken, at, bind, check_free, listen
from wire.security import InsecureAddress
from wire.tracing import Tracing

log = logs.get_logger("worker")

FLUSH_S = 2.0  # how long streams may take to send their last messages
LOOK_S = 0.5  # how often the stage is asked whether it makes progress
_PR_SET_PDEATHSIG = 1


class CannotStart(Exception):
    """The model or the options cannot be served; str() is the one sentence that the user gets."""


class Observed(Protocol):
    """An Observer, or two of one process."""

    tracing: Tracing

    @property
    def registry(self) -> CollectorRegistry: ...
    @property
    def model(self) -> str: ...
    def reading(self) -> metrics.Reading: ...


class Stage(Protocol):
    """What computes. `load` may take long and must leave the loop free; the others come after it, in this order."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the services that answer UNAVAILABLE until the model is loaded."""

    async def load(self, address: str, say: Callable[[str], None]) -> str:
        """Returns what is served, in a few words. Raises CannotStart."""

    @property
    def observer(self) -> Observed:
        """What it tells of its requests."""

    @property
    def trouble(self) -> str:
        """Why it is not ready, though it is up, in a few words; empty if it is."""

    async def run(self) -> None: ...
    async def drain(self, grace: float) -> None: ...
    async def close(self) -> None: ...


def run_worker(role: Role, stage_of: Callable[[WorkerOptions], Stage], argv: Sequence[str] | None = None) -> int:
    """The whole life of a worker; returns the exit code. Call it before anything has loaded torch."""
    try:
        options = parse(role, sys.argv[1:] if argv is None else argv, os.environ)
        _limit_threads(options.threads)
        if options.exit_with_parent:
            _exit_with_parent()
        logs.configure(role.name, options.log_level)
        return uvloop.run(_Process(options, stage_of(options)).run())
    except (BadOption, PortTaken, InsecureAddress, CannotStart) as error:
        print(f"pagewire {role.name}: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        # The border of the process: the log has the traceback, the user gets a sentence.
        log.exception("worker_broke")
        print(f"pagewire {role.name}: internal error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def leave(code: int) -> NoReturn:
    """Ends the process without Python's own teardown: all is closed, and taking torch apart costs most of a second."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _tell_if_broken(aside: asyncio.Task[None]) -> None:
    """Whoever computes goes on without an audience."""
    if not aside.cancelled() and (error := aside.exception()) is not None:
        log.error("http_broke", exc_info=error)


def _limit_threads(threads: int) -> None:
    """Before torch loads: two busy-waiting OpenMP pools on the same cores stop each other almost completely."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["OMP_NUM_THREADS"] = str(threads)


def _exit_with_parent() -> None:
    """The kernel sends SIGTERM when the parent dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died in between
        raise CannotStart("the process that started this one is gone")


class _Process:
    def __init__(self, options: WorkerOptions, stage: Stage) -> None:
        self._options = options
        self._stage = stage
        self._stop = asyncio.Event()
        self._ready = False

    async def run(self) -> int:
        options, began = self._options, time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = listen(options.host, options.http_port, options.security)
        check_free(options.host, options.port)  # gRPC would say it too, in the words of its C++ core
        server = open_server(options.security, internal=True)
        health = Health(server, (options.role.service, *options.role.also))
        self._stage.register(server)
        port = bind(server, options.host, options.port, options.security)
        await server.start()
        await health.start()
        address = options.address(port)
        observer = self._stage.observer
        observer.tracing = await asyncio.to_thread(tracing.start, os.environ, options.role.name, options.name)
        self._say(f"HTTP on {at(options.host, http.getsockname()[1])}")
        aside = asyncio.create_task(self._aside(observer, http))
        aside.add_done_callback(_tell_if_broken)
        try:
            loading = asyncio.create_task(self._stage.load(address, self._say))
            await self._first(loading, self._stop.wait())
            if not loading.done():
                leave(0)  # the thread that reads the model cannot be stopped, and has nothing to lose
            served = await loading
            await self._set_ready(health, True)
            self._say(f"ready at {address} after {time.monotonic() - began:.1f} s: {served}")
            await self._work(health)
        finally:
            await server.stop(FLUSH_S)
            aside.cancel()
            await asyncio.wait([aside])
            http.close()
            await self._stage.close()
            await observer.tracing.close()
        self._say("stopped")
        return 0

    async def _aside(self, observer: Observed, http: socket.socket) -> None:
        """What operators look at, until cancelled."""
        from wire.http import WorkerDoor, serve  # when the process answers its health check already

        options = self._options
        registry = metrics.shown(observer.registry, options.metrics_compat, lambda: observer.model)
        door = WorkerDoor(registry, lambda: self._ready, options.security.token)
        await asyncio.gather(serve(door, http, options.security), metrics.report(observer.reading, self._say))

    async def _set_ready(self, health: Health, ready: bool) -> None:
        self._ready = ready
        await health.set_ready(ready)

    async def _work(self, health: Health) -> None:
        """Returns when a signal has come and the drain is over; raises what ended the stage otherwise."""
        grace = self._options.grace
        working = asyncio.create_task(self._stage.run())
        watching = asyncio.create_task(self._watch(health))
        try:
            await self._first(working, self._stop.wait())
            watching.cancel()
            if not working.done():
                await self._set_ready(health, False)
                self._say(f"draining for at most {grace:g} s; a second signal ends at once")
                await self._first(working, self._stage.drain(grace))
            if working.done():
                await working
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.wait([working, watching])

    async def _watch(self, health: Health) -> None:
        """Not ready while the stage has a trouble, such as a step that hangs, and ready again when it is over."""
        ready = True
        while True:
            await asyncio.sleep(LOOK_S)
            trouble = self._stage.trouble
            if ready == bool(trouble):
                ready = not ready
                await self._set_ready(health, ready)
                self._say("ready again" if ready else f"not ready: {trouble}")

    async def _first(self, working: asyncio.Task[Any], other: Coroutine[Any, Any, Any]) -> None:
        """Until either is done; `other` is cancelled if it is not the one, and raises here if it failed."""
        task = asyncio.create_task(other)
        try:
            await asyncio.wait([working, task], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            leave(128 + number)
        self._stop.set()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # whoever read this may be gone: a drain goes on without an audience
            print(f"{self._options.name}: {line}", flush=True)
