"""How two processes of one user on one host meet: at an abstract Unix socket that is named after the owner.

A Door is the owner's end. It greets whoever knocks, and keeps the connection open: its end says that the owner is gone.
Whoever is on another host, or in another network namespace, finds nobody there; another user gets nothing. What a
greeting says and what comes with it is the business of the transport that opened the door.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvtransfer.paths import NoPath
from wire.tasks import cancel_all

_PEER = struct.Struct("iII")  # pid, uid, gid
HANDSHAKE_S = 3.0
LOOK_S = 0.001  # between looks for an answer
PAUSE_S = 0.1  # after a connection that could not be taken, such as for want of descriptors
MAX_PEERS = 64  # processes that hold one pool


def same_user(peer: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


class Door:
    """The owner's half of a transport (kvtransfer.paths.Export). Greets, and gives copies of `descriptors` away, until
    closed. Its length: who is connected."""

    def __init__(self, address: str, greeting: bytes, descriptors: Sequence[int] = ()) -> None:
        self._address = address
        self._greeting = greeting
        self._descriptors = tuple(descriptors)
        self._peers: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._peers)

    def start(self) -> None:
        listener = _socket()
        listener.bind(self._address)
        listener.listen(MAX_PEERS)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def prepare(self) -> float:
        return 0.0

    async def offer(self) -> bytes:
        return b""  # the incarnation names the socket

    def opened(self) -> None:
        pass  # nothing is asked of the owner

    def closed(self) -> None:
        pass

    async def close(self) -> None:
        await cancel_all([task for task in (self._accepting, *self._peers) if task is not None])

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    peer, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self.refused[f"not accepted: {error.strerror}"] += 1
                    await asyncio.sleep(PAUSE_S)
                    continue
                if len(self._peers) >= MAX_PEERS:
                    self.refused["too many peers"] += 1
                    peer.close()
                    continue
                task = asyncio.create_task(self._serve(peer))
                self._peers.add(task)
                task.add_done_callback(self._peers.discard)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            if not same_user(peer):
                self.refused["another user"] += 1
                return
            with contextlib.suppress(OSError):  # it is gone already
                socket.send_fds(peer, [self._greeting], self._descriptors)
                await asyncio.get_running_loop().sock_recv(peer, 1)  # it says nothing, and ends


class Answer(NamedTuple):
    """Whoever gets it closes the descriptors and, unless a Lifeline does, the connection."""

    greeting: bytes
    descriptors: list[int]
    connection: socket.socket


async def knock(address: str, greeting_bytes: int, descriptors: int = 0) -> Answer:
    """The puller's. An answer may be a byte longer than it should, which shows, and never has more descriptors. Raises
    NoPath."""
    connection = _socket()
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await asyncio.get_running_loop().sock_connect(connection, address)
            if not same_user(connection):
                raise NoPath("its owner is another user")
            while True:
                try:
                    greeting, given, _, _ = socket.recv_fds(connection, greeting_bytes + 1, descriptors)
                    return Answer(greeting, given, connection)
                except BlockingIOError:
                    await asyncio.sleep(LOOK_S)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise NoPath("no answer") from error
        if isinstance(error, ConnectionRefusedError):
            raise NoPath("not offered on this host") from error
        if isinstance(error, OSError):
            raise NoPath(f"no connection: {error.strerror}") from error
        raise


class Lifeline:
    """The connection to an owner: `gone` is called when the owner has ended, and not after close()."""

    def __init__(self, connection: socket.socket, gone: Callable[[], Awaitable[None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch(connection, gone))

    async def _watch(self, connection: socket.socket, gone: Callable[[], Awaitable[None]]) -> None:
        with connection:
            with contextlib.suppress(OSError):
                await self._loop.sock_recv(connection, 1)
            await gone()

    def close(self) -> None:
        """From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._watching.cancel)
