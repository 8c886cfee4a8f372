"""KV blocks as messages of at most 1 MiB: the transport that works between any two hosts.

The owner reads a chunk only when it is about to be sent. The puller writes a chunk only into a block that the core
names at that moment, after checking its bounds, and reports a position as copied only after all of it is in place and
was read back for its digest; where no digests are compared each chunk's crc32c is. A message of bytes is put together
and taken apart here, as protobuf would but without its copies. Nothing here decides anything: the cores do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import google_crc32c
import grpc.aio

from kvtransfer.paths import Cache
from protos import worker_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["KvTransferService"].full_name
CHUNK_BYTES = 1 << 20
_EVENT_DATA = pb.PullEvent.DATA_FIELD_NUMBER << 3 | 2  # tags: field number and wire type
_POSITION = pb.BlockData.POSITION_FIELD_NUMBER << 3
_OFFSET = pb.BlockData.OFFSET_FIELD_NUMBER << 3
_DATA = pb.BlockData.DATA_FIELD_NUMBER << 3 | 2
_CRC = pb.BlockData.CRC32C_FIELD_NUMBER << 3 | 5


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


class Chunk(NamedTuple):
    """A BlockData as it came. `data` is a view of the message."""

    position: int
    offset: int
    data: memoryview
    crc32c: int


# ---- the message --------------------------------------------------------------------------------------------------


def chunks(position: int, data: memoryview) -> Iterator[bytes]:
    """One block as PullEvents on the wire. Lazy: a chunk's bytes are read when it is asked for."""
    for offset in range(0, len(data), CHUNK_BYTES):
        yield encode(position, offset, bytes(data[offset : offset + CHUNK_BYTES]))


def encode(position: int, offset: int, chunk: bytes) -> bytes:
    """PullEvent(data=BlockData(...)).SerializeToString(), with one copy of the bytes."""
    head = b""
    if position:
        head += bytes((_POSITION,)) + _varint(position)
    if offset:
        head += bytes((_OFFSET,)) + _varint(offset)
    if chunk:
        head += bytes((_DATA,)) + _varint(len(chunk))
    crc = google_crc32c.value(chunk)
    tail = bytes((_CRC,)) + crc.to_bytes(4, "little") if crc else b""
    size = len(head) + len(chunk) + len(tail)
    return b"".join((bytes((_EVENT_DATA,)), _varint(size), head, chunk, tail))


def encoded(event: pb.PullEvent | bytes) -> bytes:
    """The serializer of Pull's events: those with bytes are serialized already."""
    return event if isinstance(event, bytes) else event.SerializeToString()


def decoded(message: bytes) -> pb.PullEvent | Chunk:
    """The deserializer of Pull's events. A message of bytes that is not exactly as `encode` makes it is protobuf's to
    read, or to refuse."""
    if message[:1] == bytes((_EVENT_DATA,)) and (chunk := _chunk(message)) is not None:
        return chunk
    event = pb.PullEvent.FromString(message)
    if event.WhichOneof("event") != "data":
        return event
    data = event.data
    return Chunk(data.position, data.offset, memoryview(data.data), data.crc32c)


def pull_of(channel: grpc.aio.Channel) -> Any:
    """The stub's Pull, whose events are PullEvents and Chunks."""
    return channel.stream_stream(f"/{SERVICE}/Pull", pb.PullRequest.SerializeToString, decoded)


def _chunk(message: bytes) -> Chunk | None:
    try:
        size, at = _read_varint(message, 1)
        if at + size != len(message):
            return None
        position = offset = crc = 0
        view = memoryview(b"")
        if message[at] == _POSITION:
            position, at = _read_varint(message, at + 1)
        if message[at] == _OFFSET:
            offset, at = _read_varint(message, at + 1)
        if message[at] == _DATA:
            length, at = _read_varint(message, at + 1)
            view = memoryview(message)[at : at + length]
            at += length
        if at + 5 == len(message) and message[at] == _CRC:
            crc, at = int.from_bytes(message[at + 1 :], "little"), at + 5
    except IndexError:
        return None
    return Chunk(position, offset, view, crc) if at == len(message) else None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The value and where it ends. Raises IndexError beyond ten bytes as beyond the message."""
    value = 0
    for shift in range(0, 64, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise IndexError


# ---- the puller ---------------------------------------------------------------------------------------------------


class Receiver:
    """The incoming bytes of one pull."""

    def __init__(self, pull: int, cache: Cache, destinations: Destinations, *, digests: bool = True) -> None:
        self._pull = pull
        self._cache = cache
        self._destinations = destinations
        self._digests = digests
        self._received: dict[int, int] = {}  # position -> bytes in place, of blocks that are not complete
        self.bytes = 0

    def receive(self, chunk: Chunk) -> int | None:
        """Puts one chunk into place. The block's digest if it was the last one, else None; raises CorruptBlock."""
        position, offset, data = chunk.position, chunk.offset, chunk.data
        block = self._destinations.destination(self._pull, position)
        if block is None:
            raise CorruptBlock(position, f"position {position} was not asked for")
        size = self._cache.layout.block_bytes
        expected = self._received.get(position, 0)
        end = offset + len(data)
        if offset != expected or not data or end > size:
            raise CorruptBlock(
                position, f"bytes {offset} to {end} of position {position}: expected {expected} to {size}"
            )
        if not self._digests and google_crc32c.value(bytes(data)) != chunk.crc32c:
            raise CorruptBlock(position, f"bytes {offset} to {end} of position {position} have a wrong checksum")
        self._cache.write(block, offset, data)
        self.bytes += len(data)
        if end < size:
            self._received[position] = end
            return None
        self._received.pop(position, None)
        if not self._digests:
            return 0
        return self._cache.digest(block, position, self._destinations.block_tokens(self._pull, position))
