"""A message of block bytes that is put together by hand is protobuf's, byte for byte, and read as protobuf reads it."""

from __future__ import annotations

import google_crc32c
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.transports.grpc_bytes import CHUNK_BYTES, Chunk, chunks, decoded, encode
from protos import worker_pb2 as pb


def by_protobuf(position: int, offset: int, data: bytes, crc: int) -> bytes:
    return pb.PullEvent(data=pb.BlockData(position=position, offset=offset, data=data, crc32c=crc)).SerializeToString()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_encoding_is_protobuf_s(position: int, offset: int, data: bytes) -> None:
    message = encode(position, offset, data)
    crc = google_crc32c.value(data)
    assert message == by_protobuf(position, offset, data, crc)
    assert decoded(message) == Chunk(position, offset, memoryview(data), crc)


@given(st.binary(max_size=80))
@settings(max_examples=500, deadline=None)
def test_whatever_comes_is_read_as_protobuf_reads_it(data: bytes) -> None:
    for message in (data, b"\x12" + data, b"\x12" + bytes([len(data)]) + data):
        try:
            event = pb.PullEvent.FromString(message)
        except DecodeError:
            with pytest.raises(DecodeError):
                decoded(message)
            continue
        found = decoded(message)
        if event.WhichOneof("event") == "data":
            theirs = event.data
            assert found == Chunk(theirs.position, theirs.offset, memoryview(theirs.data), theirs.crc32c)
        else:
            assert found == event


def test_a_block_travels_in_pieces_that_cover_it() -> None:
    block = memoryview(bytes(range(256)) * (CHUNK_BYTES // 100))
    pieces = [decoded(message) for message in chunks(7, block)]
    assert b"".join(bytes(piece.data) for piece in pieces if isinstance(piece, Chunk)) == bytes(block)
    assert [piece.offset for piece in pieces if isinstance(piece, Chunk)] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
