"""An owner and a puller of KV blocks with their real drivers, streams and transports, in this process and on its loop.

What kvtransfer_cores plays without a network stands here behind a gRPC server, its exports and its probe blocks; the
puller has Peers and PullClients as a decode worker has.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence

import grpc.aio
from kvtransfer_cores import SPARE, Owner, Puller, layout

from engine.messages import Node, RequestKey, Ticket
from engine.shared_memory import SharedMemory
from engine.types import FinishReason
from kvtransfer.actions import Action
from kvtransfer.paths import Export, Import
from kvtransfer.peers import Peers
from kvtransfer.probe import ProbeOwner, fill
from kvtransfer.pulls import PullClients
from kvtransfer.service import KvTransferService, add_to_server
from kvtransfer.ticket import layout_digest
from kvtransfer.transports import nixl
from kvtransfer.transports.memfd import MemfdExport, MemfdImport
from wire.channel import open_channel, open_server
from wire.security import Security

KEY = RequestKey(5, 1)
PLACED = RequestKey(5, 1, 1)


class PullSide:
    """A puller with its peers and clients."""

    def __init__(
        self,
        puller: Puller,
        imports: Sequence[Import] = (),
        *,
        only: str = "",
        floor: float = 0.0,
        digests: bool = True,
        connect: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self.puller = puller
        spare = range(puller.pool.num_blocks, puller.cache.num_blocks)
        self.said: list[str] = []
        node = Node("decode-0", random.getrandbits(64), "127.0.0.1:1")
        self.peers = Peers(
            node,
            puller.cache,
            spare,
            connect or open_plain,
            imports,
            only=only,
            floor=floor,
            say=self.said.append,
        )
        self.clients = PullClients(
            puller, puller.cache, self.at_puller, self.peers, self.peers.channels, digests=digests
        )

    def at_puller(self, actions: list[Action]) -> None:
        for action in actions:
            self.clients.carry(action)  # type: ignore[arg-type]

    def start(self, ticket: Ticket, key: RequestKey = PLACED, transport: str = "grpc") -> int:
        pull, actions = self.puller.start(ticket, key, time.monotonic(), transport)
        self.at_puller(actions)
        return pull

    def cancel(self, pull: int) -> None:
        self.at_puller(self.puller.cancel(pull, time.monotonic()))

    async def close_clients(self) -> None:
        await self.clients.close()
        await self.peers.close()


class Pair(PullSide):
    """`kinds` are the paths that both ends offer, beside grpc."""

    def __init__(
        self,
        port: int,
        num_blocks: int = 16,
        block_bytes: int = 1 << 16,
        *,
        kinds: Sequence[str] = (),
        only: str = "",
        floor: float = 0.0,
        digests: bool = True,
        incarnation: int = 0,
    ) -> None:
        puller = Puller(num_blocks, block_bytes)
        self.memory = SharedMemory((num_blocks + SPARE) * block_bytes)
        self.node = Node("prefill-0", incarnation or random.getrandbits(64), f"127.0.0.1:{port}")
        self.owner = Owner(num_blocks, block_bytes, self.node, memory=self.memory)
        self.owner.outbox.transports = frozenset((*kinds, "grpc"))
        self.exports = [self.export(kind) for kind in kinds]
        self.imports = [self.import_(kind, puller) for kind in kinds]
        super().__init__(puller, self.imports, only=only, floor=floor, digests=digests)
        kinds = (*kinds, "grpc")
        handles = fill(self.owner.cache, range(num_blocks, num_blocks + SPARE), 1)
        self.probe = ProbeOwner(self.node, layout(block_bytes), handles, kinds)
        self.service = KvTransferService(
            self.owner,
            self.owner.cache,
            self.at_owner,
            node=self.node,
            probe=self.probe,
            exports=self.exports,
            transports=kinds,
        )
        self.server = open_server(Security(), internal=True)
        add_to_server(self.service, self.server)
        self.server.add_insecure_port(f"127.0.0.1:{port}")

    def export(self, kind: str) -> Export:
        if kind == "nixl":
            agent = nixl.AgentOnDemand(self.node, self.owner.cache.layout, nixl.cpu_region(self.owner.cache))
            return nixl.NixlExport(agent, layout_digest(self.owner.cache.layout))
        return MemfdExport(self.node.incarnation, self.owner.cache.layout, self.memory)

    def import_(self, kind: str, puller: Puller) -> Import:
        cache = puller.cache
        if kind == "nixl":
            node = Node("decode-0", self.node.incarnation ^ 1, "")
            agent = nixl.AgentOnDemand(node, cache.layout, nixl.cpu_region(cache))
            return nixl.NixlImport(agent, layout_digest(cache.layout))
        return MemfdImport(cache.layout)

    async def start_server(self) -> None:
        for export in self.exports:
            export.start()
        await self.server.start()

    def at_owner(self, actions: list[Action]) -> None:
        for action in actions:
            self.service.carry(action)  # type: ignore[arg-type]

    def seal(self, ticket: Ticket, positions: Iterable[int]) -> None:
        self.at_owner(self.owner.seal(ticket.id, positions, time.monotonic()))

    def finish(self, ticket: Ticket, finish_reason: FinishReason | None = None) -> None:
        self.at_owner(self.owner.finish(ticket.id, time.monotonic(), finish_reason))

    def revoke(self, ticket: Ticket) -> None:
        self.at_owner(self.owner.revoke(ticket.id, time.monotonic()))

    def expected(self, ticket: Ticket) -> list[bytes]:
        return [bytes(self.owner.cache.block_bytes(block)) for block in self.owner.tables[ticket.id]]

    def compute(self, ticket: Ticket) -> list[bytes]:
        """The whole prompt at once: its blocks' bytes."""
        self.seal(ticket, range(ticket.num_blocks))
        expected = self.expected(ticket)
        self.finish(ticket)
        return expected

    @property
    def route(self) -> str:
        return self.peers.paths()[0].transport

    async def over(self) -> None:
        await until(lambda: len(self.service) == len(self.clients) == len(self.puller.inbox) == len(self.probe) == 0)
        self.owner.pool.audit(self.owner.holders())
        self.puller.pool.audit(self.puller.holders())

    async def close(self) -> None:
        await self.close_clients()
        await self.server.stop(None)  # it does not wait until the handlers have run to their end
        for export in self.exports:
            await export.close()
        await self.over()


def open_plain(address: str) -> grpc.aio.Channel:
    return open_channel(address, Security(), internal=True)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)
