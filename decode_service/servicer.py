"""The decode stage on the network: Attach sessions, Pull streams to owners, and the engine that makes tokens.

Translates between protobuf and the core's values, and holds the parts of the process together. Decides nothing:
that is the Decoder's.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from decode_service.decoder import Decoder
from engine.blocks import BlockPool
from engine.device_thread import DeviceThread
from engine.messages import Node, TransportOffer, WorkerHello
from kvtransfer.actions import MeetPeers
from kvtransfer.driver import STUCK, Driver
from kvtransfer.offer import Transports, puller_transports
from kvtransfer.paths import GB
from kvtransfer.peers import Peers
from kvtransfer.pulls import PullClients
from kvtransfer.startup import Assemble, Engine, Say, assemble_worker
from protos import worker_pb2, worker_pb2_grpc
from wire.channel import open_channel, write
from wire.codec import decode_command_from_pb, decode_event_to_pb
from wire.observer import Observer
from wire.options import WorkerOptions
from wire.session import serve


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """A wire.worker Stage. Until the model is loaded every call is refused.

    A process that has both stages calls `begin` of each, instead of `load`, and runs them itself.
    """

    def __init__(self, options: WorkerOptions, assemble: Assemble = assemble_worker) -> None:
        self.observer = Observer("decode")
        self._options = options
        self._assemble = assemble
        self._device = DeviceThread("decode")
        self._driver: Driver | None = None
        self._hello: WorkerHello | None = None
        self._pulls: PullClients | None = None
        self._peers: Peers | None = None

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def load(self, address: str, say: Say) -> str:
        engine = await self._device.run(self._assemble, self._options, say)
        node = Node(self._options.name, secrets.randbits(64), address)
        pool = BlockPool(engine.config.num_blocks)

        def driven(core: Decoder) -> Driver:
            return Driver(core, engine.runner.step, self._device, engine.ahead, observer=self.observer)

        transports = self.begin(engine, node, pool, engine.spare, driven, say)
        await transports.prove()
        return f"{engine.description}, {transports}"

    def begin(
        self,
        engine: Engine,
        node: Node,
        pool: BlockPool,
        spare: Sequence[int],
        driven: Callable[[Decoder], Driver],
        say: Say,
        *,
        beside: Sequence[TransportOffer] = (),
    ) -> Transports:
        """From here on calls are answered. `spare` are blocks behind the pool's, for probes; a stage on the same pool
        makes `beside` possible."""
        options = self._options
        transports = puller_transports(options.transport, engine, node)
        core = Decoder(
            node,
            engine.layout,
            engine.config,
            pool,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.runner.eos_token_ids,
            transport=transports.kinds[0],
            depth=engine.depth,
        )
        self._driver = driven(core)
        cache = engine.runner.cache
        self._peers = Peers(
            node,
            cache,
            spare,
            self._connect,
            transports.imports,
            missing=transports.missing,
            only="" if options.transport == "auto" else options.transport,
            floor=options.min_transfer_gbps * GB,
            say=say,
        )
        core.kv_paths, core.refuses = self._peers.paths, self._peers.refuses
        self._pulls = PullClients(
            core, cache, self._driver.apply, self._peers, self._peers.channels, digests=options.kv_digest
        )
        self._driver.carry = self._carry
        self._hello = engine.hello(node, [*beside, *transports.offers])
        self.observer.serving(core, self._hello, self._options.model)
        return transports

    def _carry(self, action: Any) -> None:
        assert self._peers is not None and self._pulls is not None, "an action before load"
        if isinstance(action, MeetPeers):
            self._peers.meet(action.owners)
        else:
            self._pulls.carry(action)

    def _connect(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self._options.security, internal=True)

    @property
    def trouble(self) -> str:
        if self._driver is not None and self._driver.stuck:
            return STUCK
        return "" if self._peers is None else self._peers.refuses()

    async def run(self) -> None:
        assert self._driver, "run before load"
        await self._driver.run()

    async def drain(self, grace: float) -> None:
        assert self._driver, "drain before load"
        await self._driver.drain(grace)

    async def close(self) -> None:
        if self._peers is not None:
            self._peers.abort()
        if self._pulls is not None:
            await self._pulls.close()
        if self._peers is not None:
            await self._peers.close()
        self._device.close()

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: grpc.aio.ServicerContext
    ) -> None:
        if self._driver is None or self._hello is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        session = serve(
            request_iterator, context, self._hello, self._driver.stream(), decode_command_from_pb, decode_event_to_pb
        )
        async with contextlib.aclosing(session):
            async for event in session:
                await write(context, event)
