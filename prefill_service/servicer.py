"""The prefill stage on the network: Attach sessions, Pull streams, and the engine that computes prompts.

Translates between protobuf and the core's values, and holds the parts of the process together. Decides nothing:
that is the Prefiller's.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio

from engine.blocks import BlockPool
from engine.device_thread import DeviceThread
from engine.messages import BlockHandle, Node, TransportOffer, WorkerHello
from kvtransfer.driver import STUCK, Driver
from kvtransfer.offer import Transports, owner_transports
from kvtransfer.probe import ProbeOwner, fill
from kvtransfer.service import KvTransferService, add_to_server
from kvtransfer.startup import Assemble, Engine, Say, assemble_worker
from prefill_service.prefiller import Prefiller, Promises
from protos import worker_pb2, worker_pb2_grpc
from wire.channel import write
from wire.codec import prefill_command_from_pb, prefill_event_to_pb
from wire.observer import Observer
from wire.options import WorkerOptions
from wire.session import serve


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer, worker_pb2_grpc.KvTransferServiceServicer):
    """A wire.worker Stage. Until the model is loaded every call is refused.

    A process that has both stages calls `begin` of each, instead of `load`, and runs them itself.
    """

    def __init__(self, options: WorkerOptions, assemble: Assemble = assemble_worker) -> None:
        self.observer = Observer("prefill")
        self._options = options
        self._assemble = assemble
        self._device = DeviceThread("prefill")
        self._driver: Driver | None = None
        self._hello: WorkerHello | None = None
        self._transfer: KvTransferService | None = None
        self._transports: Transports | None = None

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)
        add_to_server(self, server)

    async def load(self, address: str, say: Say) -> str:
        engine = await self._device.run(self._assemble, self._options, say)
        node = Node(self._options.name, secrets.randbits(64), address)
        probe = await self._device.run(fill, engine.runner.cache, engine.spare, secrets.randbits(64))
        pool = BlockPool(engine.config.num_blocks)

        def driven(core: Prefiller) -> Driver:
            return Driver(core, engine.runner.step, self._device, engine.ahead, observer=self.observer)

        transports = self.begin(engine, node, pool, probe, driven)
        await transports.prove()
        return f"{engine.description}, {transports}"

    def begin(
        self,
        engine: Engine,
        node: Node,
        pool: BlockPool,
        probe: Sequence[BlockHandle],
        driven: Callable[[Prefiller], Driver],
        *,
        promises: Promises | None = None,
        beside: Sequence[TransportOffer] = (),
    ) -> Transports:
        """From here on calls are answered. `probe` are blocks behind the pool's, filled; `promises` those of a stage on
        the same pool, which makes `beside` possible."""
        transports = self._transports = owner_transports(self._options.transport, engine, node)
        core = Prefiller(
            node,
            engine.layout,
            engine.config,
            pool,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.runner.eos_token_ids,
            depth=engine.depth,
            digests=self._options.kv_digest,
            transports=transports.kinds,
            rng=random.Random(secrets.randbits(64)),
            promises=promises,
        )
        self._driver = driven(core)
        self._transfer = KvTransferService(
            core,
            engine.runner.cache,
            self._driver.apply,
            node=node,
            probe=ProbeOwner(node, engine.layout, probe, transports.kinds),
            exports=transports.exports,
            transports=transports.kinds,
        )
        self._driver.carry = self._transfer.carry
        for export in transports.exports:
            export.start()
        self._hello = engine.hello(node, [*beside, *transports.offers])
        self.observer.serving(core, self._hello, self._options.model, lambda: core.expired_leases)
        return transports

    @property
    def trouble(self) -> str:
        return STUCK if self._driver is not None and self._driver.stuck else ""

    async def run(self) -> None:
        assert self._driver, "run before load"
        await self._driver.run()

    async def drain(self, grace: float) -> None:
        assert self._driver, "drain before load"
        await self._driver.drain(grace)

    async def close(self) -> None:
        if self._transports is not None:
            for export in self._transports.exports:
                await export.close()
        self._device.close()

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommand], context: grpc.aio.ServicerContext
    ) -> None:
        if self._driver is None or self._hello is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        session = serve(
            request_iterator, context, self._hello, self._driver.stream(), prefill_command_from_pb, prefill_event_to_pb
        )
        async with contextlib.aclosing(session):
            async for event in session:
                await write(context, event)

    async def Pair(self, request: worker_pb2.PairRequest, context: grpc.aio.ServicerContext) -> worker_pb2.PairReply:
        if self._transfer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        return await self._transfer.Pair(request, context)

    async def Pull(
        self, request_iterator: AsyncIterator[worker_pb2.PullRequest], context: grpc.aio.ServicerContext
    ) -> None:
        if self._transfer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        await self._transfer.Pull(request_iterator, context)
