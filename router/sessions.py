"""The router's sessions: one task for every worker address, which attaches, reports, and attaches again.

Owns the channels to the workers and what waits to be sent on them. A worker is named by host:port; a host name is
looked up every few seconds, and each of its addresses is a worker. Knows nothing of requests: what workers say goes
to the driver, in order.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from engine.messages import Node, Peers, RouterHello, WorkerHello
from protos import worker_pb2_grpc
from router.actions import ToWorker
from router.config import split_target
from router.driver import Driver
from router.workers import Role
from wire import codec
from wire.channel import open_channel
from wire.logs import get_logger
from wire.security import Security
from wire.session import Outbound, SessionOver, attach

log = get_logger("sessions")

RESOLVE_S = 3.0
FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 2.0
TWIN_S = 5.0  # how long an address that leads to an attached worker is left alone

_Codec = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]
_CODECS: dict[Role, _Codec] = {
    Role.PREFILL: (worker_pb2_grpc.PrefillServiceStub, codec.prefill_event_from_pb, codec.prefill_command_to_pb),
    Role.DECODE: (worker_pb2_grpc.DecodeServiceStub, codec.decode_event_from_pb, codec.decode_command_to_pb),
}


class Sessions:
    def __init__(self, name: str, targets: Sequence[tuple[Role, str]], security: Security) -> None:
        self._name = name
        self._incarnation = secrets.randbits(64)
        self._session = 0
        self._targets = tuple(targets)
        self._security = security
        self._outbound: dict[tuple[Role, str], Outbound[Any]] = {}  # of the sessions that have greeted
        self._resolved: dict[tuple[Role, str], frozenset[str]] = {}  # addresses of each target, as last looked up
        self._tasks: dict[tuple[Role, str], asyncio.Task[None]] = {}
        # Worker processes by incarnation, and what reached each first: that address keeps it between sessions.
        self._known: dict[int, tuple[Role, str]] = {}
        self._owners: dict[str, Node] = {}  # prefill workers that are attached, by address
        self.absent: dict[tuple[Role, str], str] = {}  # addresses without a session, and why the last one ended

    def send(self, action: ToWorker) -> None:
        """A command for a session that is gone is dropped: its end says all that the command could have said."""
        outbound = self._outbound.get((action.role, action.address))
        if outbound is not None:
            outbound.put(action.command)

    async def run(self, driver: Driver) -> None:
        """Keeps a session to every address of every target until cancelled."""
        try:
            while True:
                await self._resolve_all()
                for role, address in self._wanted():
                    key = (role, address)
                    if key in self._tasks and not self._tasks[key].done():
                        continue
                    self._check(key)
                    self._tasks[key] = asyncio.create_task(self._keep(role, address, driver))
                await asyncio.sleep(RESOLVE_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # ---- names ----------------------------------------------------------------------------------------------

    def _wanted(self) -> list[tuple[Role, str]]:
        pairs = {(role, address) for (role, _), found in self._resolved.items() for address in found}
        return sorted(pairs, key=lambda pair: (pair[0].value, pair[1]))

    def _name_of(self, role: Role, address: str) -> str:
        """The host of the first target that leads to this address: its certificate is for that name."""
        named = [target for (each, target), found in self._resolved.items() if each is role and address in found]
        return split_target(named[0])[0] if named else ""

    async def _resolve_all(self) -> None:
        for role, target in self._targets:
            try:
                self._resolved[role, target] = await _addresses(target)
            except OSError as error:  # a name server that is away for a moment takes no worker away
                log.warning("name_not_found", target=target, error=str(error))

    def _check(self, key: tuple[Role, str]) -> None:
        """A session that broke by our own fault is logged and opened again; it does not end the others'."""
        task = self._tasks.pop(key, None)
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            log.error("session_broke", worker=key[1], stage=key[0].value, exc_info=error)

    # ---- one worker -----------------------------------------------------------------------------------------

    async def _keep(self, role: Role, address: str, driver: Driver) -> None:
        """Sessions to one address, one after another, for as long as a target leads to it."""
        backoff = FIRST_BACKOFF_S
        while (role, address) in self._wanted():
            began = time.monotonic()
            greeted, why = await self._session_once(role, address, driver)
            self.absent[role, address] = why
            if greeted:
                log.warning("session_over", worker=address, stage=role.value, why=why)
            else:
                self._forget(role, address)
                if backoff == FIRST_BACKOFF_S:  # once, not on every try of a long absence
                    log.info("no_session_yet", worker=address, stage=role.value, why=why)
            lasted = greeted and time.monotonic() - began > MOST_BACKOFF_S
            backoff = FIRST_BACKOFF_S if lasted else min(MOST_BACKOFF_S, 2 * backoff)
            await asyncio.sleep(backoff)
        self._forget(role, address)
        self.absent.pop((role, address), None)

    def _forget(self, role: Role, address: str) -> None:
        """Another address may have the worker that this one led to."""
        self._known = {worker: by for worker, by in self._known.items() if by != (role, address)}

    async def _session_once(self, role: Role, address: str, driver: Driver) -> tuple[bool, str]:
        """One session from its opening to its end: whether the worker greeted, and why it ended."""
        stub_of, from_pb, to_pb = _CODECS[role]
        outbound: Outbound[Any] = Outbound()
        incarnation: int | None = None

        def on_hello(hello: WorkerHello) -> None:
            nonlocal incarnation
            other = self._known.get(hello.node.incarnation)
            if other is not None and other[1] != address:
                raise _Twin(hello.node.incarnation, other[1])
            self._forget(role, address)  # another process, before a restart
            incarnation = hello.node.incarnation
            self._known.setdefault(incarnation, (role, address))
            self._outbound[role, address] = outbound
            self.absent.pop((role, address), None)
            log.info("session_open", worker=address, stage=role.value, name=hello.node.name)
            driver.worker_up(address, role, hello)
            self._introduce(role, address, hello.node)

        channel = open_channel(address, self._security, internal=True, name=self._name_of(role, address))
        self._session += 1
        hello = RouterHello(self._name, self._incarnation, self._session)
        try:
            await attach(
                stub_of(channel).Attach,
                hello,
                outbound,
                on_hello,
                lambda event: driver.worker_event(address, role, event),
                from_pb,
                to_pb,
            )
            why = "the worker ended the session"
        except SessionOver as error:
            why = f"it is no {role.value} worker" if _unknown_method(error.__cause__) else str(error)
        except _Twin as error:
            why = str(error)
            log.warning("worker_not_used", worker=address, stage=role.value, why=why)
            await asyncio.sleep(TWIN_S)
            while self._known.get(error.incarnation, (role, address))[1] != address:
                await asyncio.sleep(TWIN_S)  # attaching here ends the session over there
        finally:
            if incarnation is not None:
                if role is Role.PREFILL:
                    self._owners.pop(address, None)
                del self._outbound[role, address]
                driver.worker_down(address, role)
            await channel.close()
        return incarnation is not None, why

    def _introduce(self, role: Role, address: str, node: Node) -> None:
        """Every decode worker pairs with every prefill worker before the first request: here it learns of them."""
        if role is Role.PREFILL:
            self._owners[address] = node
        told = [out for (each, _), out in self._outbound.items() if each is Role.DECODE]
        for outbound in told if role is Role.PREFILL else [self._outbound[role, address]]:
            if self._owners:
                outbound.put(Peers(tuple(self._owners.values())))


def _unknown_method(cause: BaseException | None) -> bool:
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED


class _Twin(Exception):
    """Another address in use leads to this worker process too."""

    def __init__(self, incarnation: int, other: str) -> None:
        super().__init__(f"it is the worker that is attached as {other} already")
        self.incarnation = incarnation


async def _addresses(target: str) -> frozenset[str]:
    """Every IPv4 address of the name, or every IPv6 address where it has no other."""
    host, port = split_target(target)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    v4 = {f"{info[4][0]}:{port}" for info in found if info[0] is socket.AF_INET}
    v6 = {f"[{info[4][0]}]:{port}" for info in found if info[0] is socket.AF_INET6}
    return frozenset(v4 or v6)
