"""KV blocks as messages of at most 1 MiB, each with a crc32c: the transport that works between any two hosts.

The owner reads a chunk only when it is about to be sent. The puller writes a chunk only into a block that the
core names at that moment, after checking its bounds and its checksum, and reports a position as copied only
after all of it is in place and was read back for its digest. Nothing here decides anything: the cores do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import google_crc32c

from kvtransfer.paths import Cache
from protos import worker_pb2 as pb

CHUNK_BYTES = 1 << 20


class Destinations(Protocol):
    """What the receiver asks of the decoder's core."""

    def destination(self, pull: int, position: int) -> int | None:
        """The block that may be written at this moment; None if the pull is over or the position not awaited."""

    def block_tokens(self, pull: int, position: int) -> Sequence[int]:
        """The tokens that the block at this position holds; fewer than block_size in a last block."""


class CorruptBlock(Exception):
    """Bytes that cannot be used: the pull fails closed. `position` is what the message claimed."""

    def __init__(self, position: int, sentence: str) -> None:
        super().__init__(sentence)
        self.position = position


def chunks(position: int, data: memoryview) -> Iterator[pb.PullEvent]:
    """One block as messages. Lazy: a chunk's bytes are read when it is asked for."""
    for offset in range(0, len(data), CHUNK_BYTES):
        chunk = bytes(data[offset : offset + CHUNK_BYTES])
        crc = google_crc32c.value(chunk)
        yield pb.PullEvent(data=pb.BlockData(position=position, offset=offset, data=chunk, crc32c=crc))


class Receiver:
    """The incoming bytes of one pull."""

    def __init__(self, pull: int, cache: Cache, destinations: Destinations, *, digests: bool = True) -> None:
        self._pull = pull
        self._cache = cache
        self._destinations = destinations
        self._digests = digests
        self._received: dict[int, int] = {}  # position -> bytes in place, of blocks that are not complete
        self.bytes = 0

    def receive(self, message: pb.BlockData) -> int | None:
        """Puts one chunk into place. The block's digest if it was the last one, else None; raises CorruptBlock."""
        position, offset, chunk = message.position, message.offset, message.data
        block = self._destinations.destination(self._pull, position)
        if block is None:
            raise CorruptBlock(position, f"position {position} was not asked for")
        size = self._cache.layout.block_bytes
        expected = self._received.get(position, 0)
        end = offset + len(chunk)
        if offset != expected or not chunk or end > size:
            raise CorruptBlock(
                position, f"bytes {offset} to {end} of position {position}: expected {expected} to {size}"
            )
        if google_crc32c.value(chunk) != message.crc32c:
            raise CorruptBlock(position, f"bytes {offset} to {end} of position {position} have a wrong checksum")
        self._cache.write(block, offset, chunk)
        self.bytes += len(chunk)
        if end < size:
            self._received[position] = end
            return None
        self._received.pop(position, None)
        if not self._digests:
            return 0
        return self._cache.digest(block, position, self._destinations.block_tokens(self._pull, position))
