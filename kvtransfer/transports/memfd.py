"""Blocks out of the owner's memory: its pool's descriptor, mapped read-only once per owner, then one memcpy per block.

A MemfdExport gives the descriptor of one incarnation to processes of the same user, over an abstract Unix socket named
after that incarnation: whoever is on another host, or in another network namespace, finds nobody there. A source is
gone when the owner's end of the socket closes. Nothing here decides which block may be read or written, and no copy is
believed before the owner was asked about it: the cores see to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.kv_digest import kv_digest
from engine.messages import KvLayout, Node
from engine.shared_memory import SEALS, SharedMemory
from kvtransfer.paths import Cache, Copy, NoPath
from kvtransfer.ticket import layout_digest
from kvtransfer.transports.hands import Hands
from wire.tasks import cancel_all

_GREETING = struct.Struct("<8sQQ32s")  # magic, incarnation, bytes of the pool, layout
_MAGIC = b"pagewire"
_PEER = struct.Struct("iII")  # pid, uid, gid
HANDSHAKE_S = 1.0
MAX_PEERS = 64  # processes that hold one pool
RUN_BYTES = 16 << 20  # of one copy, where blocks follow each other
SLICE_BYTES = 64 << 20


def _address(incarnation: int) -> str:
    return f"\0pagewire-kv-{incarnation:016x}"


def _same_user(peer: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


# ---- the owner of blocks ------------------------------------------------------------------------------------------


class MemfdExport:
    """Gives the descriptor away until closed. Each connection stays open: its end says that the owner is gone."""

    kind = "memfd"

    def __init__(self, incarnation: int, layout: KvLayout, memory: SharedMemory) -> None:
        self._greeting = _GREETING.pack(_MAGIC, incarnation, memory.size, layout_digest(layout))
        self._memory = memory
        self._incarnation = incarnation
        self._peers: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._peers)

    def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
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
            with contextlib.suppress(OSError):  # it is gone already
                socket.send_fds(peer, [self._greeting], [self._memory.fd])
                await asyncio.get_running_loop().sock_recv(peer, 1)  # it says nothing, and ends


# ---- the puller ---------------------------------------------------------------------------------------------------


class MemfdSource:
    """One owner's blocks, mapped read-only. Unmapped when nobody refers to it any more."""

    slice_bytes = SLICE_BYTES

    def __init__(self, descriptor: int, size: int, block_bytes: int) -> None:
        self._data = np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)
        self._block_bytes = block_bytes
        self._hands = Hands()
        self._watching: asyncio.Task[None] | None = None
        self.num_blocks = size // block_bytes
        self.operations = 0
        self.gone = False

    def watch(self, peer: socket.socket) -> None:
        """Until the owner is gone: its memory stays readable, and nobody should read it."""
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch(peer))

    async def _watch(self, peer: socket.socket) -> None:
        with peer:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_recv(peer, 1)
            self.gone = True

    def copy(self, cache: Cache, copies: Sequence[Copy]) -> list[int]:
        self.operations += len(copies)
        if all(each.tokens is None for each in copies):
            self._hands.each(lambda run: self._move(cache, run), _runs(copies, max(1, RUN_BYTES // self._block_bytes)))
            return [0] * len(copies)

        def one(each: Copy) -> int:
            self._move(cache, [each])
            data = cache.block_bytes(each.destination)
            return 0 if each.tokens is None else kv_digest(data, each.position, each.tokens)

        return self._hands.each(one, copies)

    def _move(self, cache: Cache, run: Sequence[Copy]) -> None:
        """One copy of blocks that follow each other at both ends."""
        size, first = self._block_bytes, run[0]
        target = cache.block_bytes(first.destination, len(run))
        np.copyto(np.frombuffer(target, np.uint8), self._data[first.source * size : (first.source + len(run)) * size])

    def abort(self) -> None:
        pass  # a memcpy ends by itself

    def close(self) -> None:
        if self._watching is not None:
            self._loop.call_soon_threadsafe(self._watching.cancel)
        self._hands.close()


def _runs(copies: Sequence[Copy], longest: int) -> list[Sequence[Copy]]:
    """Blocks that follow each other both where they are and where they go, together."""
    runs: list[list[Copy]] = []
    for each in copies:
        last = runs[-1][-1] if runs else None
        next_to = last is not None and (each.source, each.destination) == (last.source + 1, last.destination + 1)
        if next_to and len(runs[-1]) < longest:
            runs[-1].append(each)
        else:
            runs.append([each])
    return list(runs)


class MemfdImport:
    """Maps the memory of other processes of this user on this host."""

    kind = "memfd"

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self.refused: Counter[str] = Counter()

    async def prepare(self) -> float:
        return 0.0

    async def connect(self, owner: Node, offer: bytes) -> MemfdSource:
        try:
            source, peer = await self._connect(owner.incarnation)
        except NoPath as refusal:
            self.refused[str(refusal)] += 1
            raise
        source.watch(peer)
        return source

    async def close(self) -> None:
        pass

    async def _connect(self, incarnation: int) -> tuple[MemfdSource, socket.socket]:
        loop = asyncio.get_running_loop()
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.sock_connect(peer, _address(incarnation))
                if not _same_user(peer):
                    raise NoPath("its owner is another user")
                while True:
                    try:
                        greeting, descriptors, _, _ = socket.recv_fds(peer, _GREETING.size + 1, 1)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(0.001)
            return self._map(incarnation, greeting, descriptors), peer
        except NoPath:
            peer.close()
            raise
        except TimeoutError as error:
            peer.close()
            raise NoPath("no answer") from error
        except ConnectionRefusedError as error:
            peer.close()
            raise NoPath("not offered on this host") from error
        except OSError as error:
            peer.close()
            raise NoPath(f"no descriptor: {error.strerror}") from error
        except BaseException:
            peer.close()
            raise

    def _map(self, incarnation: int, greeting: bytes, descriptors: Sequence[int]) -> MemfdSource:
        """Checks all that was said against what was given. The descriptor is closed: the mapping keeps the memory."""
        try:
            if len(greeting) != _GREETING.size or len(descriptors) != 1:
                raise NoPath("an answer that is none")
            magic, theirs, size, layout = _GREETING.unpack(greeting)
            if magic != _MAGIC or theirs != incarnation:
                raise NoPath("another incarnation")
            if layout != layout_digest(self._layout):
                raise NoPath("another layout")
            (descriptor,) = descriptors
            if os.fstat(descriptor).st_size != size or not size or size % self._layout.block_bytes:
                raise NoPath("a descriptor of another size")
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:  # a shrinking file would kill its reader
                raise NoPath("a descriptor without seals")
            return MemfdSource(descriptor, size, self._layout.block_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
