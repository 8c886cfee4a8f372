"""Blocks out of the owner's memory: its pool's descriptor, mapped read-only once per owner, then one memcpy per block.

A MemfdExport gives the descriptor of one incarnation to processes of the same user (same_host). A source is gone, and
the memory let go, when the owner's end of the socket closes. Nothing here decides which block may be read or written,
and no copy is believed before the owner was asked about it: the cores see to that.
"""

from __future__ import annotations

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
from kvtransfer.paths import Cache, Copy, CopyFailed, NoPath
from kvtransfer.ticket import layout_digest
from kvtransfer.transports.hands import Hands
from kvtransfer.transports.same_host import Door, Lifeline, knock

_GREETING = struct.Struct("<8sQQ32s")  # magic, incarnation, bytes of the pool, layout
_MAGIC = b"pagewire"
RUN_BYTES = 16 << 20  # of one copy, where blocks follow each other
SLICE_BYTES = 64 << 20


def _address(incarnation: int) -> str:
    return f"\0pagewire-kv-{incarnation:016x}"


# ---- the owner of blocks ------------------------------------------------------------------------------------------


class MemfdExport(Door):
    """Gives the descriptor away until closed."""

    kind = "memfd"

    def __init__(self, incarnation: int, layout: KvLayout, memory: SharedMemory) -> None:
        greeting = _GREETING.pack(_MAGIC, incarnation, memory.size, layout_digest(layout))
        super().__init__(_address(incarnation), greeting, [memory.fd])


# ---- the puller ---------------------------------------------------------------------------------------------------


class MemfdSource:
    """One owner's blocks, mapped read-only for as long as the owner lives and nobody has closed this."""

    slice_bytes = SLICE_BYTES

    def __init__(self, descriptor: int, size: int, block_bytes: int) -> None:
        mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._data: np.ndarray | None = np.frombuffer(mapping, np.uint8)  # unmapped when nobody refers to it any more
        self._block_bytes = block_bytes
        self._hands = Hands()
        self._lifeline: Lifeline | None = None
        self.num_blocks = size // block_bytes
        self.operations = 0
        self.gone = False

    def watch(self, connection: socket.socket) -> None:
        """Until the owner is gone: its memory would stay readable, and be held, and nobody should read it."""
        self._lifeline = Lifeline(connection, self._owner_gone)

    async def _owner_gone(self) -> None:
        self.gone, self._data = True, None

    def copy(self, cache: Cache, copies: Sequence[Copy]) -> list[int]:
        data = self._data  # mapped until this has ended
        if data is None:
            raise CopyFailed("owner gone")
        self.operations += len(copies)
        if all(each.tokens is None for each in copies):
            runs = _runs(copies, max(1, RUN_BYTES // self._block_bytes))
            self._hands.each(lambda run: self._move(data, cache, run), runs)
            return [0] * len(copies)

        def one(each: Copy) -> int:
            self._move(data, cache, [each])
            written = cache.block_bytes(each.destination)
            return 0 if each.tokens is None else kv_digest(written, each.position, each.tokens)

        return self._hands.each(one, copies)

    def _move(self, data: np.ndarray, cache: Cache, run: Sequence[Copy]) -> None:
        """One copy of blocks that follow each other at both ends."""
        size, first = self._block_bytes, run[0]
        target = cache.block_bytes(first.destination, len(run))
        np.copyto(np.frombuffer(target, np.uint8), data[first.source * size : (first.source + len(run)) * size])

    def abort(self) -> None:
        pass  # a memcpy ends by itself

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        self._data = None
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
            answer = await knock(_address(owner.incarnation), _GREETING.size, descriptors=1)
            try:
                source = self._map(owner.incarnation, answer.greeting, answer.descriptors)
            except NoPath:
                answer.connection.close()
                raise
        except NoPath as refusal:
            self.refused[str(refusal)] += 1
            raise
        source.watch(answer.connection)
        return source

    async def close(self) -> None:
        pass

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
        except OSError as error:
            raise NoPath(f"its memory cannot be mapped: {error.strerror}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
