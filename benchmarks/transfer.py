"""KV transfer between two processes' worth of state on this CPU: each path beside its raw peer in the same run.

`memfd` stands beside a plain copy out of the same kind of memory, `grpc` beside a bare grpc.aio stream of the same
messages on the same kind of channel. A round moves --size bytes in blocks of --block, from sealed at the owner to
validated at the puller, through the real state machines and drivers. Streams are open before, ours and the bare one:
a Pull is opened while its prompt is still computed. Rounds of path and peer alternate, and medians are compared.
Owner and puller share this process and its loop. `python -m benchmarks.transfer`
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import grpc.aio
import numpy as np

from engine.blocks import BlockPool
from engine.fake_runner import FakeCache
from engine.kv_digest import kv_digest
from engine.messages import (
    BlockHandle,
    FirstToken,
    KvLayout,
    Node,
    PullEvent,
    PullOpened,
    PullRequest,
    Reason,
    RequestKey,
    Ticket,
)
from engine.shared_memory import SharedMemory
from engine.types import Token
from kvtransfer.actions import Action, Announced, Drained, FreeTicket, Landed, PullFailed, Ready
from kvtransfer.inbox import Inbox
from kvtransfer.outbox import Outbox
from kvtransfer.service import KvTransferService, PullClients
from kvtransfer.ticket import layout_digest
from kvtransfer.transports.grpc_bytes import chunks
from kvtransfer.transports.memfd import PoolServer
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from wire.channel import open_channel, open_server, write
from wire.flags import parse_bytes
from wire.ports import bind
from wire.security import Security

BLOCK_SIZE = 16
GIB = 2**30


def tokens_at(position: int) -> range:
    return range(position * BLOCK_SIZE, (position + 1) * BLOCK_SIZE)


class Owner:
    """A prompt whose blocks are all computed, and sealed when a round begins."""

    def __init__(self, layout: KvLayout, num_blocks: int, digests: bool) -> None:
        self.memory = SharedMemory(num_blocks * layout.block_bytes)
        self.cache = FakeCache(layout, num_blocks)
        self.cache.data = memoryview(self.memory.map)
        data = np.frombuffer(self.cache.data, np.uint8)
        data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
        self.node = Node("owner", random.getrandbits(64), "")
        self.outbox = Outbox(self.node, layout_digest(layout), block_bytes=layout.block_bytes)
        blocks = (self.cache.block_bytes(block) for block in range(num_blocks))
        self.handles = [
            BlockHandle(number, 0, number, kv_digest(data, number, tokens_at(number)) if digests else 0)
            for number, data in enumerate(blocks)
        ]

    def offer(self, number: int) -> Ticket:
        count = len(self.handles)
        ticket = Ticket(number, self.node, count * BLOCK_SIZE, count, 60.0)
        now, key = time.monotonic(), RequestKey(number, 1)
        self.outbox.offer(ticket, key, 1, now + 60, range(count), [0] * count, now)
        return ticket

    def seal(self, ticket: Ticket) -> list[Action]:
        now, first = time.monotonic(), FirstToken(RequestKey(ticket.id, 1), Token(0, 1))
        return [*self.outbox.sealed(ticket.id, self.handles, now), *self.outbox.first_token(ticket.id, first, now)]

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]:
        return _without_free(self.outbox.pull_message(pull, message, now))

    def sent(self, pull: int, position: int, now: float) -> list[Action]:
        return self.outbox.sent(pull, position)

    def pull_closed(self, pull: int, now: float) -> list[Action]:
        return self.outbox.pull_closed(pull, now)


def _without_free(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, FreeTicket)]


class Puller:
    """Binds what is announced, and says when all of it is validated."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.cache = FakeCache(layout, num_blocks)
        self.pool = BlockPool(num_blocks)
        self.inbox = Inbox(layout_digest(layout))
        self._bound: list[int] = []

    def start(self, ticket: Ticket, transport: str) -> list[Action]:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        return self.inbox.open(ticket, RequestKey(ticket.id, 1, 1), (), transport, time.monotonic())[1]

    def destination(self, pull: int, position: int) -> int | None:
        return self.inbox.destination(pull, position)

    def block_tokens(self, pull: int, position: int) -> Sequence[int]:
        return tokens_at(position)

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]:
        if isinstance(event, PullOpened):
            self.opened.set_result(None)
        return self._notice(self.inbox.message(pull, event, now), now)

    def copied(self, pull: int, position: int, digest: int, now: float) -> list[Action]:
        return self._notice(self.inbox.copied(pull, position, digest, now), now)

    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]:
        return self._notice(self.inbox.copy_failed(pull, position, now), now)

    def pull_stream_closed(self, pull: int, now: float) -> list[Action]:
        actions = self._notice(self.inbox.stream_closed(pull, now), now)
        self.pool.give(self._bound)
        self._bound = []
        self.over.set_result(None)
        return actions

    def fall_back(self, pull: int, reason: str) -> None:
        raise RuntimeError(f"memfd cannot be measured: {reason}")

    def _notice(self, actions: Iterable[Action], now: float) -> list[Action]:
        rest: list[Action] = []
        for action in actions:
            match action:
                case Announced(pull, positions):
                    blocks = self.pool.take(len(positions))
                    self._bound += blocks
                    rest += self.inbox.bind(pull, dict(zip(positions, blocks, strict=True)), now)
                case Ready():
                    self.ready.set_result(None)
                case PullFailed(_, reason):
                    self._fail(reason)
                case Landed() | Drained():
                    pass
                case _:
                    rest.append(action)
        return rest

    def _fail(self, reason: Reason) -> None:
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"a pull failed: {reason.name}"))


class Bare(worker_pb2_grpc.KvTransferServiceServicer):
    """Streams the same BlockData messages for each request, and nothing else."""

    def __init__(self, cache: FakeCache) -> None:
        self._cache = cache

    async def Pull(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await write(context, pb.PullEvent())
        async for _ in requests:
            for block in range(self._cache.num_blocks):
                for message in chunks(block, self._cache.block_bytes(block)):
                    await write(context, message)


class Bench:
    def __init__(self, layout: KvLayout, num_blocks: int, digests: bool) -> None:
        self.bytes = num_blocks * layout.block_bytes
        self.owner = Owner(layout, num_blocks, digests)
        self.puller = Puller(layout, num_blocks)
        self.pool = PoolServer(self.owner.node.incarnation, layout, self.owner.memory)
        self.service = KvTransferService(self.owner, self.owner.cache, self._at_owner)
        self.clients = PullClients(self.puller, self.puller.cache, self._at_puller, self._connect, digests=digests)
        self._servers: list[grpc.aio.Server] = []
        self._bare = open_channel("127.0.0.1:1", Security(), internal=True)
        self._tickets = 0

    def _at_owner(self, actions: list[Action]) -> None:
        for action in actions:
            self.service.carry(action)  # type: ignore[arg-type]

    def _at_puller(self, actions: list[Action]) -> None:
        for action in actions:
            self.clients.carry(action)  # type: ignore[arg-type]

    @staticmethod
    def _connect(address: str) -> grpc.aio.Channel:
        return open_channel(address, Security(), internal=True)

    async def start(self) -> None:
        self.pool.start()
        address = await self._serve(self.service)
        self.owner.node = self.owner.node._replace(address=address)
        self._bare = self._connect(await self._serve(Bare(self.owner.cache)))

    async def _serve(self, servicer: worker_pb2_grpc.KvTransferServiceServicer) -> str:
        server = open_server(Security(), internal=True)
        worker_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
        port = bind(server, "127.0.0.1", 0, Security())
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self.clients.close()
        await self._bare.close()
        for server in self._servers:
            await server.stop(None)
        await self.pool.close()

    async def pull(self, transport: str) -> float:
        """Seconds from sealed to validated."""
        self._tickets += 1
        ticket = self.owner.offer(self._tickets)
        self._at_puller(self.puller.start(ticket, transport))
        await self.puller.opened
        began = time.perf_counter()
        self._at_owner(self.owner.seal(ticket))
        await self.puller.ready
        seconds = time.perf_counter() - began
        await self.puller.over
        return seconds

    async def plain_copy(self) -> float:
        """One copy of as many bytes from the owner's memory into the puller's, on another thread too."""
        target, source = (np.frombuffer(cache.data, np.uint8) for cache in (self.puller.cache, self.owner.cache))
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(None, np.copyto, target, source)
        return time.perf_counter() - began

    async def bare_stream(self) -> float:
        call = worker_pb2_grpc.KvTransferServiceStub(self._bare).Pull()
        await call.read()
        began = time.perf_counter()
        await call.write(pb.PullRequest())
        received = 0
        while received < self.bytes:
            received += len((await call.read()).data.data)
        seconds = time.perf_counter() - began
        call.cancel()
        return seconds


async def compare(name: str, bench: Bench, path: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> None:
    await path(), await peer()
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(await path())
        theirs.append(await peer())
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(
        f"{name:<22} {bench.bytes / mine / GIB:6.2f} GiB/s  {1e3 * mine:7.2f} ms   "
        f"peer {bench.bytes / other / GIB:6.2f} GiB/s  {1e3 * other:7.2f} ms   ratio {other / mine:.2f}"
    )


async def measure(size: int, block: int, rounds: int, paths: Sequence[str]) -> None:
    print(f"{size} bytes in blocks of {block}, median of {rounds} rounds; ratio: peer's time / ours")
    for digests in (True, False):
        layout = KvLayout(b"benchmark", "bytes", BLOCK_SIZE, 1, 1, 1, block, "")
        bench = Bench(layout, size // block, digests)
        await bench.start()
        suffix = "" if digests else ", digest off"
        try:
            if "memfd" in paths:
                await compare(f"memfd{suffix}", bench, partial(bench.pull, "memfd"), bench.plain_copy, rounds)
            if "grpc" in paths:
                await compare(f"grpc{suffix}", bench, partial(bench.pull, "grpc"), bench.bare_stream, rounds)
        finally:
            await bench.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="KV transfer paths of this CPU beside their raw peers.")
    parser.add_argument("--size", type=parse_bytes, default=64 << 20)
    parser.add_argument("--block", type=parse_bytes, default=2 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--path", choices=("memfd", "grpc"), action="append")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    if given.block < 1 or given.size < given.block or given.size % given.block:
        parser.error(f"--size must be a multiple of --block, got {given.size} and {given.block}")
    asyncio.run(measure(given.size, given.block, given.rounds, given.path or ("memfd", "grpc")))


if __name__ == "__main__":
    main()
