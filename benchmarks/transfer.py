"""KV transfer between two processes' worth of state on this CPU: each path beside its raw peer in the same run.

`memfd` stands beside a plain copy out of the same kind of memory and `nixl` beside one READ of the same blocks, both by
one thread where ours are two if a core is idle; `grpc` beside a bare grpc.aio stream of the same messages on the same
kind of channel. A round moves --size bytes in blocks of --block, from sealed at the owner to validated at the puller,
through the real state machines and drivers. Streams are open before, ours and the bare one: a Pull is opened while its
prompt is still computed. Rounds of path and peer alternate, and medians are compared. `hand-over` is the same for one
block: what a first token waits for after the last chunk. Owner and puller share this process and its loop.
`python -m benchmarks.transfer` or `pagewire bench kv`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import numpy as np
import uvloop

from benchmarks import transfer_raw as raw
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
    RequestKey,
    Ticket,
)
from engine.shared_memory import SharedMemory
from engine.types import Token
from kvtransfer.actions import Action, Announced, Drained, FreeTicket, Landed, PullFailed, Ready
from kvtransfer.inbox import Inbox
from kvtransfer.outbox import Outbox
from kvtransfer.paths import Export, Import, NoPath
from kvtransfer.peers import Peers
from kvtransfer.probe import ProbeOwner, fill, spare_blocks
from kvtransfer.pulls import PullClients
from kvtransfer.service import KvTransferService, add_to_server
from kvtransfer.ticket import layout_digest
from kvtransfer.transports import nixl
from kvtransfer.transports.memfd import MemfdExport, MemfdImport
from protos import worker_pb2_grpc
from wire import logs
from wire.channel import open_channel, open_server
from wire.flags import parse_bytes
from wire.ports import bind
from wire.security import Security

BLOCK_SIZE = 16
PATHS = ("memfd", "nixl", "grpc")
GB = 1e9


class Figure(NamedTuple):
    """Medians of one path, in seconds."""

    path: str
    digests: bool
    bytes: int
    ours: float
    raw: float
    hand_over: float
    warm: float  # to connect, exchange descriptors and prove the path
    start: float  # of the path's own library
    operations: int  # of the transport, in one round

    def __str__(self) -> str:
        name = self.path if self.digests else f"{self.path}, digests off"
        warm = f"{1e3 * self.warm:4.0f} ms" + (f" (+ {self.start:.1f} s start)" if self.start > 0.01 else "")
        return (
            f"{name:<18} {self.bytes / self.ours / GB:6.2f} GB/s  {1e3 * self.ours:7.2f} ms   "
            f"raw {self.bytes / self.raw / GB:6.2f} GB/s   ratio {self.raw / self.ours:.2f}   "
            f"hand-over {1e3 * self.hand_over:6.2f} ms   warm in {warm}"
        )


def tokens_at(position: int) -> range:
    return range(position * BLOCK_SIZE, (position + 1) * BLOCK_SIZE)


class Owner:
    """A prompt whose blocks are all computed, and sealed when a round begins."""

    def __init__(self, layout: KvLayout, num_blocks: int, digests: bool) -> None:
        self.spare = range(num_blocks, num_blocks + spare_blocks(layout.block_bytes))
        self.memory = SharedMemory(self.spare.stop * layout.block_bytes)
        self.cache = FakeCache(layout, self.spare.stop)
        self.cache.data = memoryview(self.memory.map)
        data = np.frombuffer(self.cache.data, np.uint8)
        data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
        self.node = Node("owner", random.getrandbits(64), "")
        self.outbox = Outbox(self.node, layout_digest(layout), block_bytes=layout.block_bytes, transports=PATHS)
        blocks = (self.cache.block_bytes(block) for block in range(num_blocks))
        self.handles = [
            BlockHandle(number, 0, number, kv_digest(data, number, tokens_at(number)) if digests else 0)
            for number, data in enumerate(blocks)
        ]

    def offer(self, number: int, count: int) -> Ticket:
        ticket = Ticket(number, self.node, count * BLOCK_SIZE, count, 60.0)
        now, key = time.monotonic(), RequestKey(number, 1)
        self.outbox.offer(ticket, key, 1, now + 60, range(count), [0] * count, now)
        return ticket

    def seal(self, ticket: Ticket) -> list[Action]:
        now, first = time.monotonic(), FirstToken(RequestKey(ticket.id, 1), Token(0, 1))
        sealed = self.outbox.sealed(ticket.id, self.handles[: ticket.num_blocks], now)
        return [*sealed, *self.outbox.first_token(ticket.id, first, now)]

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
        self.spare = range(num_blocks, num_blocks + spare_blocks(layout.block_bytes))
        self.cache = FakeCache(layout, self.spare.stop)
        np.frombuffer(self.cache.data, np.uint8)[:] = 0  # its pages are there, as those of a pool in use
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

    def copied(self, pull: int, digests: Mapping[int, int], now: float) -> list[Action]:
        return self._notice(self.inbox.copied(pull, digests, now), now)

    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]:
        return self._notice(self.inbox.copy_failed(pull, position, now), now)

    def pull_stream_closed(self, pull: int, now: float) -> list[Action]:
        actions = self._notice(self.inbox.stream_closed(pull, now), now)
        self.pool.give(self._bound)
        self._bound = []
        self.over.set_result(None)
        return actions

    def reroute(self, pull: int, transport: str, path: str) -> None:
        self.inbox.reroute(pull, transport)

    def no_path(self, pull: int, cause: str, now: float) -> list[Action]:
        self.opened.set_exception(NoPath(cause))
        return self._notice(self.inbox.no_path(pull, {}), now)

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
                    if not self.ready.done():
                        self.ready.set_exception(RuntimeError(f"a pull failed: {reason.name}"))
                        self.ready.exception()  # who waits for `opened` learns it there
                case Landed() | Drained():
                    pass
                case _:
                    rest.append(action)
        return rest


class Bench:
    """One path between an owner and a puller, and its raw peer."""

    def __init__(self, path: str, layout: KvLayout, num_blocks: int, digests: bool) -> None:
        self.path = path
        self.digests = digests
        self.num_blocks = num_blocks
        self.bytes = num_blocks * layout.block_bytes
        self.owner = Owner(layout, num_blocks, digests)
        self.puller = Puller(layout, num_blocks)
        self._layout = layout
        self._servers: list[grpc.aio.Server] = []
        self._bare = open_channel("127.0.0.1:1", Security(), internal=True)
        self._tickets = 0

    async def start(self) -> None:
        """Raises NoPath if this path cannot be had here."""
        owner, layout = self.owner, self._layout
        export, imports = self._transport()
        handles = fill(owner.cache, owner.spare, 1)
        kinds = (self.path,)
        self.service = KvTransferService(
            owner,
            owner.cache,
            self._at_owner,
            node=owner.node,
            probe=ProbeOwner(owner.node, layout, handles, kinds),
            exports=[export] if export else [],
            transports=kinds,
        )
        address = await self._serve(lambda server: add_to_server(self.service, server))
        owner.node = owner.node._replace(address=address)
        bare = raw.BareStream(owner.cache, self.num_blocks)
        self._bare = _connect(
            await self._serve(lambda server: worker_pb2_grpc.add_KvTransferServiceServicer_to_server(bare, server))
        )
        self._export = export
        if export is not None:
            export.start()
        node = Node("puller", random.getrandbits(64), "")
        puller = self.puller
        self.peers = Peers(node, puller.cache, puller.spare, _connect, imports, only=self.path)
        self.clients = PullClients(
            puller, puller.cache, self._at_puller, self.peers, self.peers.channels, digests=self.digests
        )
        await self.peers.reach(owner.node)

    def _transport(self) -> tuple[Export | None, list[Import]]:
        """Raises NoPath."""
        layout, owner, puller = self._layout, self.owner, self.puller
        if self.path == "memfd":
            return MemfdExport(owner.node.incarnation, layout, owner.memory), [MemfdImport(layout)]
        if self.path == "grpc":
            return None, []
        nixl.available()
        digest = layout_digest(layout)
        self._agents = (
            nixl.AgentOnDemand(owner.node, layout, nixl.cpu_region(owner.cache)),
            nixl.AgentOnDemand(Node("puller", random.getrandbits(64), ""), layout, nixl.cpu_region(puller.cache)),
        )
        return nixl.NixlExport(self._agents[0], digest), [nixl.NixlImport(self._agents[1], digest)]

    def _at_owner(self, actions: list[Action]) -> None:
        for action in actions:
            self.service.carry(action)  # type: ignore[arg-type]

    def _at_puller(self, actions: list[Action]) -> None:
        for action in actions:
            self.clients.carry(action)  # type: ignore[arg-type]

    async def _serve(self, add: Callable[[grpc.aio.Server], None]) -> str:
        server = open_server(Security(), internal=True)
        add(server)
        port = bind(server, "127.0.0.1", 0, Security())
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self.clients.close()
        await self.peers.close()
        await self._bare.close()
        for server in self._servers:
            await server.stop(None)
        if self._export is not None:
            await self._export.close()

    async def pull(self, count: int) -> float:
        """Seconds from sealed to validated, of the first `count` blocks."""
        self._tickets += 1
        ticket = self.owner.offer(self._tickets, count)
        self._at_puller(self.puller.start(ticket, self.path))
        await self.puller.opened
        began = time.perf_counter()
        self._at_owner(self.owner.seal(ticket))
        await self.puller.ready
        seconds = time.perf_counter() - began
        await self.puller.over
        return seconds

    def peer(self) -> Callable[[], Awaitable[float]]:
        if self.path == "memfd":
            return lambda: raw.plain_copy(self.owner.cache, self.puller.cache, self.bytes)
        if self.path == "grpc":
            return lambda: raw.bare_stream(self._bare, self.bytes)
        owner, puller = (agents.agent for agents in self._agents)
        assert owner is not None and puller is not None, "a path that was proved has its agents"
        return raw.RawNixl(puller, owner, self.num_blocks).read

    @property
    def operations(self) -> int:
        route = self.peers.route_of(self.owner.node)
        return 0 if route is None or route.source is None else route.source.operations


def _connect(address: str) -> grpc.aio.Channel:
    return open_channel(address, Security(), internal=True)


async def compare(bench: Bench, rounds: int) -> Figure:
    peer = bench.peer()
    await bench.pull(bench.num_blocks), await peer()
    before = bench.operations
    await bench.pull(bench.num_blocks)
    operations = bench.operations - before
    ours, theirs, last = [], [], []
    for _ in range(rounds):
        ours.append(await bench.pull(bench.num_blocks))
        theirs.append(await peer())
        last.append(await bench.pull(1))
    (shown,) = bench.peers.paths()
    return Figure(
        bench.path,
        bench.digests,
        bench.bytes,
        statistics.median(ours),
        statistics.median(theirs),
        statistics.median(last),
        shown.warm_seconds,
        shown.start_seconds,
        operations,
    )


async def measure(size: int, block: int, rounds: int, paths: Sequence[str]) -> list[Figure]:
    """Prints one line per path and digest setting. A path that cannot be had says why."""
    print(f"{size} bytes in blocks of {block}, median of {rounds} rounds; ratio: raw peer's time / ours", flush=True)
    figures = []
    for path in paths:
        for digests in (True, False):
            layout = KvLayout(b"benchmark", "bytes", BLOCK_SIZE, 1, 1, 1, block, "")
            bench = Bench(path, layout, size // block, digests)
            try:
                await bench.start()
            except NoPath as refusal:
                print(f"{path:<18} not here: {refusal}", flush=True)
                break
            try:
                figures.append(await compare(bench, rounds))
            finally:
                await bench.stop()
            print(figures[-1], flush=True)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="KV transfer paths of this CPU beside their raw peers.")
    parser.add_argument("--size", type=parse_bytes, default=64 << 20)
    parser.add_argument("--block", type=parse_bytes, default=2 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--path", choices=PATHS, action="append")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    if given.block < 1 or given.size < given.block or given.size % given.block:
        parser.error(f"--size must be a multiple of --block, got {given.size} and {given.block}")
    logs.configure("transfer", "warning")
    figures = uvloop.run(measure(given.size, given.block, given.rounds, given.path or PATHS))
    if given.json is not None:
        given.json.write_text(json.dumps([figure._asdict() for figure in figures], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
