"""Blocks out of the owner's pool on a card: opened once per owner, then one gather kernel per trip over two id lists.

A CudaIpcExport gives the pool's handle to processes of the same user, over an abstract Unix socket named after the
incarnation: whoever is on another host, or in another network namespace, finds nobody there. The socket stays open: its
end says that the owner is gone, and then the memory is let go, which the driver keeps as long as anybody has it open.
Copies run beside the steps (engine.cuda_copies), on the same card or from one that this card reaches by NVLink.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from engine.kv_digest import sum_digest
from engine.messages import KvLayout, Node
from kvtransfer.paths import Cache, Copy, CopyFailed, NoPath
from kvtransfer.ticket import layout_digest
from wire.tasks import cancel_all

HANDLE_BYTES = 64
_GREETING = struct.Struct(f"<8sQQ32s{HANDLE_BYTES}s")  # magic, incarnation, blocks, layout, the pool's handle
_MAGIC = b"pagecuda"
_PEER = struct.Struct("iII")  # pid, uid, gid
HANDSHAKE_S = 1.0
MAX_PEERS = 64  # processes that hold one pool
SLICE_BYTES = 256 << 20  # of one kernel: 0.2 ms on one card, 0.7 ms by NVLink


class Copying(Protocol):
    """engine.cuda_copies.Copies"""

    def copy(self, source: int, from_ids: Sequence[int], to_ids: Sequence[int]) -> list[int]: ...


class CardCache(Cache, Protocol):
    """engine.cuda_cache.CudaKVCache"""

    @property
    def copies(self) -> Copying: ...
    def export(self) -> bytes: ...
    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...


def _address(incarnation: int) -> str:
    return f"\0pagewire-cuda-{incarnation:016x}"


def _same_user(peer: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


# ---- the owner of blocks ------------------------------------------------------------------------------------------


class CudaIpcExport:
    """Gives the handle away until closed. Raises NoPath where the driver exports nothing."""

    kind = "cuda_ipc"

    def __init__(self, incarnation: int, cache: CardCache) -> None:
        try:
            handle = cache.export()
        except RuntimeError as error:
            raise NoPath(f"the card's memory cannot be exported: {error}") from error
        self._greeting = _GREETING.pack(_MAGIC, incarnation, cache.num_blocks, layout_digest(cache.layout), handle)
        self._incarnation = incarnation
        self._peers: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._peers)

    def start(self) -> None:
        listener = _socket()
        listener.bind(_address(self._incarnation))
        listener.listen(MAX_PEERS)
        self._accepting = asyncio.create_task(self._accept(listener))

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
                peer, _ = await loop.sock_accept(listener)
                if len(self._peers) >= MAX_PEERS:
                    self.refused["too many peers"] += 1
                    peer.close()
                    continue
                task = asyncio.create_task(self._serve(peer))
                self._peers.add(task)
                task.add_done_callback(self._peers.discard)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            if not _same_user(peer):
                self.refused["another user"] += 1
                return
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):  # it is gone already
                await loop.sock_sendall(peer, self._greeting)
                await loop.sock_recv(peer, 1)  # it says nothing, and ends


# ---- the puller ---------------------------------------------------------------------------------------------------


class CudaIpcSource:
    """One owner's blocks at `address`, for as long as the owner lives and nobody has closed this."""

    slice_bytes = SLICE_BYTES

    def __init__(self, cache: CardCache, address: int, num_blocks: int) -> None:
        self._cache = cache
        self._address: int | None = address
        self._lock = threading.Lock()  # held by a copy: what it reads stays mapped until it has ended
        self._loop = asyncio.get_running_loop()
        self._watching: asyncio.Task[None] | None = None
        self.num_blocks = num_blocks
        self.operations = 0
        self.gone = False

    def watch(self, peer: socket.socket) -> None:
        """Until the owner is gone: its memory stays readable, and nobody should read it."""
        self._watching = self._loop.create_task(self._watch(peer))

    async def _watch(self, peer: socket.socket) -> None:
        with peer:
            with contextlib.suppress(OSError):
                await self._loop.sock_recv(peer, 1)
            self.gone = True
            await asyncio.to_thread(self._let_go)  # the card's next process needs the room

    def copy(self, cache: Cache, copies: Sequence[Copy]) -> list[int]:
        with self._lock:
            if self._address is None:
                raise CopyFailed("owner gone")
            self.operations += 1
            try:
                sums = self._cache.copies.copy(
                    self._address, [each.source for each in copies], [each.destination for each in copies]
                )
            except RuntimeError as error:
                raise CopyFailed(f"the card failed: {str(error).splitlines()[0]}") from error
        return [
            0 if each.tokens is None else sum_digest(total, each.position, each.tokens)
            for each, total in zip(copies, sums, strict=True)
        ]

    def abort(self) -> None:
        pass  # a kernel ends by itself

    def close(self) -> None:
        """From any thread."""
        if self._watching is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._watching.cancel)
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            address, self._address = self._address, None
            if address is not None:
                with contextlib.suppress(RuntimeError):  # the card failed: there is nothing left to give up
                    self._cache.close(address)


class CudaIpcImport:
    """Opens the pools of other processes of this user on this host."""

    kind = "cuda_ipc"

    def __init__(self, cache: CardCache) -> None:
        self._cache = cache
        self.refused: Counter[str] = Counter()

    async def prepare(self) -> float:
        return 0.0

    async def connect(self, owner: Node, offer: bytes) -> CudaIpcSource:
        try:
            greeting, peer = await _greeted(owner.incarnation)
        except NoPath as refusal:
            self.refused[str(refusal)] += 1
            raise
        try:
            source = await self._open(owner.incarnation, greeting)
        except BaseException as error:
            peer.close()
            if isinstance(error, NoPath):
                self.refused[str(error)] += 1
            raise
        source.watch(peer)
        return source

    async def close(self) -> None:
        pass

    async def _open(self, incarnation: int, greeting: bytes) -> CudaIpcSource:
        """Checks all that was said. Opening takes the driver milliseconds, in which the loop goes on."""
        layout: KvLayout = self._cache.layout
        if len(greeting) != _GREETING.size:
            raise NoPath("an answer that is none")
        magic, theirs, num_blocks, digest, handle = _GREETING.unpack(greeting)
        if magic != _MAGIC or theirs != incarnation:
            raise NoPath("another incarnation")
        if digest != layout_digest(layout):
            raise NoPath("another layout")
        if num_blocks < 1:
            raise NoPath("a pool without blocks")
        try:
            address = await asyncio.to_thread(self._cache.open, handle)
        except RuntimeError as error:
            raise NoPath(f"this card cannot reach its memory: {error}") from error
        return CudaIpcSource(self._cache, address, num_blocks)


async def _greeted(incarnation: int) -> tuple[bytes, socket.socket]:
    """What the owner says first, and the connection, which ends with it. Raises NoPath."""
    loop = asyncio.get_running_loop()
    peer = _socket()
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await loop.sock_connect(peer, _address(incarnation))
            if not _same_user(peer):
                raise NoPath("its owner is another user")
            return await loop.sock_recv(peer, _GREETING.size + 1), peer
    except BaseException as error:
        peer.close()
        if isinstance(error, TimeoutError):
            raise NoPath("no answer") from error
        if isinstance(error, ConnectionRefusedError):
            raise NoPath("not offered on this host") from error
        if isinstance(error, OSError):
            raise NoPath(f"no handle: {error.strerror}") from error
        raise
