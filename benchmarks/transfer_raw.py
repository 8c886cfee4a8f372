"""The peers of benchmarks.transfer: the same bytes moved by whatever lies below each path, and nothing else.

A plain copy between two buffers, a bare grpc.aio stream of the same messages, one NIXL READ of the same blocks. None of
them announces, binds, digests or validates anything. What runs on a thread has the priority that ours has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import grpc.aio
import numpy as np

from engine.fake_runner import FakeCache
from kvtransfer.transports.grpc_bytes import CHUNK_BYTES
from kvtransfer.transports.hands import behind, give_way
from kvtransfer.transports.nixl import Agent
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from wire.channel import write

_THREAD = ThreadPoolExecutor(1, "raw", initializer=lambda: give_way(behind()))


async def plain_copy(source: FakeCache, target: FakeCache, size: int) -> float:
    """One copy of all bytes."""
    to, out_of = (np.frombuffer(cache.data, np.uint8)[:size] for cache in (target, source))
    began = time.perf_counter()
    await asyncio.get_running_loop().run_in_executor(_THREAD, np.copyto, to, out_of)
    return time.perf_counter() - began


class BareStream(worker_pb2_grpc.KvTransferServiceServicer):
    """Streams the same BlockData messages for each request, by protobuf's own means."""

    def __init__(self, cache: FakeCache, num_blocks: int) -> None:
        self._cache = cache
        self._num_blocks = num_blocks

    async def Pull(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await write(context, pb.PullEvent())
        async for _ in requests:
            for block in range(self._num_blocks):
                data = self._cache.block_bytes(block)
                for offset in range(0, len(data), CHUNK_BYTES):
                    chunk = bytes(data[offset : offset + CHUNK_BYTES])
                    crc = google_crc32c.value(chunk)
                    message = pb.BlockData(position=block, offset=offset, data=chunk, crc32c=crc)
                    await write(context, pb.PullEvent(data=message))


async def bare_stream(channel: grpc.aio.Channel, size: int) -> float:
    """From the request to the last byte of an open stream."""
    call = worker_pb2_grpc.KvTransferServiceStub(channel).Pull()
    await call.read()
    began = time.perf_counter()
    await call.write(pb.PullRequest())
    received = 0
    while received < size:
        received += len((await call.read()).data.data)
    seconds = time.perf_counter() - began
    call.cancel()
    return seconds


class RawNixl:
    """One READ per round, of every block, between agents that know each other and lists that are prepared."""

    def __init__(self, puller: Agent, owner: Agent, num_blocks: int) -> None:
        self._nixl = puller.nixl
        self._here = puller.here
        self._there = puller.blocks(owner.name, owner.region)
        self._owner = owner
        self._ids = np.arange(num_blocks, dtype=np.int32)

    async def read(self) -> float:
        return await asyncio.get_running_loop().run_in_executor(_THREAD, self._read)

    def _read(self) -> float:
        began = time.perf_counter()
        transfer = self._nixl.make_prepped_xfer("READ", self._here, self._ids, self._there, self._ids)
        state = self._nixl.transfer(transfer)
        while state == "PROC":
            state = self._nixl.check_xfer_state(transfer)
            self._owner.progress()
        self._nixl.release_xfer_handle(transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL's own READ ended in {state}")
        return time.perf_counter() - began
