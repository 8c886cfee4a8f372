"""Blocks out of the owner's pool on a card: opened once per owner, then one gather kernel per trip over two id lists.

A CudaIpcExport gives the pool's handle to processes of the same user (same_host). When the owner's end of the socket
closes the memory is let go, which the driver keeps as long as anybody has it open. Copies run beside the steps
(engine.cuda_copies), on the same card or from one that this card reaches by NVLink.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from kvtransfer.transports.same_host import Door, Lifeline, knock

HANDLE_BYTES = 64
_GREETING = struct.Struct(f"<8sQQ32s{HANDLE_BYTES}s")  # magic, incarnation, blocks, layout, the pool's handle
_MAGIC = b"pagecuda"
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
    def room(self, address: int) -> int | None: ...
    def close(self, address: int) -> None: ...


def _address(incarnation: int) -> str:
    return f"\0pagewire-cuda-{incarnation:016x}"


# ---- the owner of blocks ------------------------------------------------------------------------------------------


class CudaIpcExport(Door):
    """Gives the handle away until closed. Raises NoPath where the driver exports nothing."""

    kind = "cuda_ipc"

    def __init__(self, incarnation: int, cache: CardCache) -> None:
        try:
            handle = cache.export()
        except RuntimeError as error:
            raise NoPath(f"the card's memory cannot be exported: {error}") from error
        greeting = _GREETING.pack(_MAGIC, incarnation, cache.num_blocks, layout_digest(cache.layout), handle)
        super().__init__(_address(incarnation), greeting)


# ---- the puller ---------------------------------------------------------------------------------------------------


class CudaIpcSource:
    """One owner's blocks at `address`, for as long as the owner lives and nobody has closed this."""

    slice_bytes = SLICE_BYTES

    def __init__(self, cache: CardCache, address: int, num_blocks: int) -> None:
        self._cache = cache
        self._address: int | None = address
        self._lock = threading.Lock()  # held by a copy: what it reads stays mapped until it has ended
        self._lifeline: Lifeline | None = None
        self.num_blocks = num_blocks
        self.operations = 0
        self.gone = False

    def watch(self, connection: socket.socket) -> None:
        """Until the owner is gone: its memory stays readable, and nobody should read it."""
        self._lifeline = Lifeline(connection, self._owner_gone)

    async def _owner_gone(self) -> None:
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
        if self._lifeline is not None:
            self._lifeline.close()
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
            answer = await knock(_address(owner.incarnation), _GREETING.size)
            try:
                source = await self._open(owner.incarnation, answer.greeting)
            except BaseException:
                answer.connection.close()
                raise
        except NoPath as refusal:
            self.refused[str(refusal)] += 1
            raise
        source.watch(answer.connection)
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
        source = CudaIpcSource(self._cache, address, num_blocks)
        if (room := self._cache.room(address)) is not None and room < num_blocks:  # reading beyond ends all on a card
            source.close()
            raise NoPath(f"a pool of {num_blocks} blocks in memory for {room}")
        return source
