"""Both stages on the network from one process: their services, one engine, one pool, and the driver of both.

Each stage's own servicer translates; this one holds the parts of the process together. A request whose two stages are
here moves nothing (transport `local`). Blocks of other workers come and go as they do for a worker of one kind.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import grpc.aio

from decode_service.decoder import Decoder
from decode_service.servicer import DecodeServicer
from engine.batch import Batch, Row, SampleInput
from engine.blocks import BlockPool
from engine.device_thread import DeviceThread
from engine.messages import BlockHandle, Node, TransportOffer
from engine.types import SamplingParams
from kvtransfer.driver import STUCK, Driver
from kvtransfer.probe import fill
from kvtransfer.startup import Assemble, Engine, Say, assemble_worker
from prefill_service.prefiller import Prefiller
from prefill_service.servicer import PrefillServicer
from shared_service.driver import SharedDriver
from shared_service.observers import Observers
from shared_service.pace import Chunks, Pace
from wire.options import WorkerOptions

if TYPE_CHECKING:
    from engine.cuda_runner import CudaRunner

LEAST_CHUNK, MOST_CHUNK = 64, 1024  # tokens, on the CPU, where whoever comes meanwhile waits for a chunk's end
LOCAL = (TransportOffer("local"),)


class SharedServicer:
    """A wire.worker Stage. Until the model is loaded every call is refused."""

    def __init__(self, options: WorkerOptions, assemble: Assemble = assemble_worker) -> None:
        self._options = options
        self._assemble = assemble
        self._device = DeviceThread("shared")
        self._beside = DeviceThread("prompts")  # unused where one step runs at a time
        self._prefill = PrefillServicer(options)
        self._decode = DecodeServicer(options)
        self._driver: SharedDriver | None = None
        self.observer = Observers(self._prefill.observer, self._decode.observer)

    def register(self, server: grpc.aio.Server) -> None:
        self._prefill.register(server)
        self._decode.register(server)

    async def load(self, address: str, say: Say) -> str:
        engine, prompts, probe, spare = await self._device.run(self._built, say)
        rows, most = engine.ahead, engine.config.max_num_batched_tokens
        if rows is None:
            chunks = Chunks(LEAST_CHUNK, min(most, MOST_CHUNK))
            shared, ahead, device = SharedDriver(chunks, Pace(0.0)), None, self._device
        else:
            shared, ahead, device = SharedDriver(Chunks(most, most), Pace()), prompts, self._beside
            await device.run(warm_up, prompts)
        node = Node(self._options.name, secrets.randbits(64), address)
        pool = BlockPool(engine.config.num_blocks)

        def decodes(core: Decoder) -> Driver:
            card_times = () if rows is None else rows.card_times
            return shared.decodes(core, engine.runner, self._device, rows, self._decode.observer, card_times)

        def prefills(core: Prefiller) -> Driver:
            return shared.prefills(core, prompts, device, ahead, self._prefill.observer)

        transports = self._decode.begin(engine, node, pool, spare, decodes, say, beside=LOCAL)
        owner = self._prefill.begin(engine, node, pool, probe, prefills, promises=shared.decoder, beside=LOCAL)
        for each in (transports, owner):
            await each.prove()
        self._driver = shared
        return f"{engine.description}, both stages over one pool, to other workers {transports}"

    def _built(self, say: Say) -> tuple[Engine, Any, list[BlockHandle], range]:
        """The engine, what computes prompts, and the blocks behind the pool's: half of them are filled for those who
        probe us, into the others go the probes of our own. On the device thread."""
        engine = self._assemble(self._options, say)
        prompts = engine.runner if engine.ahead is None else runner_beside(engine.ahead)
        half = len(engine.spare) // 2
        probe = fill(engine.runner.cache, engine.spare[:half], secrets.randbits(64))
        return engine, prompts, probe, engine.spare[half:]

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
        await self._decode.close()
        await self._prefill.close()
        self._beside.close()
        self._device.close()


def runner_beside(rows: CudaRunner) -> CudaRunner:
    """For prompts: the same weights and blocks, by a stream of its own, whose work yields to that of `rows`."""
    from engine.cuda_runner import CudaRunner

    gpu = rows.gpu.beside()
    return CudaRunner(rows.model.weights, rows.config, rows.cache.on(gpu), gpu, graphs=False)


def warm_up(prompts: CudaRunner) -> None:
    """A whole chunk and the second half of one, before anybody waits for them, then of half the size, and so on:
    libraries load and prepare what a size needs when they first meet it, some of it for one thread alone, and steps
    that run then stand still. Writes into blocks from 0 on."""
    config = prompts.config
    size = min(config.max_num_batched_tokens, config.max_model_len, config.num_blocks * config.block_size)
    blocks = list(range(-(-size // config.block_size)))
    while size > config.block_size:
        for start in (0, size // 2):
            ids = [0] * (size - start)
            sample = SampleInput(SamplingParams(temperature=0, seed=0, max_tokens=1), 0, ids, [])
            prompts.step(Batch(rows=[Row(0, ids, start, blocks, sample)]))
        size //= 2
