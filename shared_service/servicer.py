"""Both stages on the network from one process: their services, one engine, one pool, and the driver of their turns.

Each stage's own servicer translates; this one holds the parts of the process together. A request whose two stages are
here moves nothing (transport `local`). Blocks of other workers come and go as they do for a worker of one kind.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

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
from kvtransfer.startup import Assemble, Engine, Say, assemble
from prefill_service.prefiller import Prefiller
from prefill_service.servicer import PrefillServicer
from shared_service.driver import SharedDriver
from shared_service.observers import Observers
from shared_service.pace import Pace
from wire.options import WorkerOptions

LEAST_CHUNK = 64  # tokens, on the CPU
LEAST_CHUNK_ON_CARD = 256  # fewer take as long: their launches cost more than their sums
_PLANNED = 128  # tokens: attention prepares for multiples of so many (engine.models.llama_cuda)
LOCAL = (TransportOffer("local"),)


class SharedServicer:
    """A wire.worker Stage. Until the model is loaded every call is refused."""

    def __init__(self, options: WorkerOptions, assemble: Assemble = assemble) -> None:
        self._options = options
        self._assemble = assemble
        self._device = DeviceThread("shared")
        self._prefill = PrefillServicer(options)
        self._decode = DecodeServicer(options)
        self._driver: SharedDriver | None = None
        self.observer = Observers(self._prefill.observer, self._decode.observer)

    def register(self, server: grpc.aio.Server) -> None:
        self._prefill.register(server)
        self._decode.register(server)

    async def load(self, address: str, say: Say) -> str:
        engine, prompts, pace, probe, spare = await self._device.run(self._built, say)
        node = Node(self._options.name, secrets.randbits(64), address)
        pool = BlockPool(engine.config.num_blocks)
        shared = SharedDriver(self._device, pace)

        def decodes(core: Decoder) -> Driver:
            rows = engine.ahead
            clock = None if rows is None else lambda: rows.card_times[-1]
            return shared.decodes(core, engine.runner, rows, self._decode.observer, clock)

        def prefills(core: Prefiller) -> Driver:
            return shared.prefills(core, prompts, None if engine.ahead is None else prompts, self._prefill.observer)

        transports = self._decode.begin(engine, node, pool, spare, decodes, say, beside=LOCAL)
        self._prefill.begin(engine, node, pool, probe, prefills, promises=shared.decoder, beside=LOCAL)
        self._driver = shared
        return f"{engine.description}, both stages over one pool, to other workers {transports}"

    def _built(self, say: Say) -> tuple[Engine, Any, Pace, list[BlockHandle], range]:
        """The engine, what computes prompts and how fast, and the blocks behind the pool's: half of them are filled for
        those who probe us, into the others go the probes of our own. On the device thread."""
        engine = self._assemble(self._options, say)
        most = engine.config.max_num_batched_tokens
        prompts: Any = engine.runner
        pace = Pace(LEAST_CHUNK, most)
        if engine.ahead is not None:
            from engine.cuda_runner import CudaRunner

            rows = engine.ahead
            prompts = CudaRunner(rows.model.weights, engine.config, rows.cache, rows.gpu, graphs=False)
            pace = Pace(LEAST_CHUNK_ON_CARD, most)
            pace.token_seconds = warm_chunks(prompts, pace.sizes)
        spare = engine.spare
        half = len(spare) // 2
        return engine, prompts, pace, fill(engine.runner.cache, spare[:half], secrets.randbits(64)), spare[half:]

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
        self._device.close()


def warm_chunks(prompts: Any, sizes: Sequence[int]) -> float:
    """One chunk of each size that needs it, and half of it again behind the first half, before anybody waits for them.
    Writes into blocks from 0 on. Returns the seconds of a token more in a chunk, 0 if there is no telling."""
    took: dict[int, float] = {}
    config = prompts.config
    for size in (size for size in sizes if size % _PLANNED == 0):
        blocks = list(range(-(-size // config.block_size)))
        if size >= config.max_model_len or len(blocks) > config.num_blocks:
            break
        ids = [0] * size
        prompts.step(_chunk(ids, 0, blocks))
        prompts.step(_chunk(ids[: size // 2], size // 2, blocks))
        took[size] = prompts.step(_chunk(ids, 0, blocks)).seconds
    most = max(took, default=0)
    half = min(took, key=lambda size: abs(size - most / 2), default=0)  # a small one's time is that of its launches
    return max(0.0, took[most] - took[half]) / (most - half) if most > half else 0.0


def _chunk(ids: Sequence[int], start: int, blocks: Sequence[int]) -> Batch:
    params = SamplingParams(temperature=0, seed=0, max_tokens=1)
    return Batch(rows=[Row(0, ids, start, blocks, SampleInput(params, 0, ids, []))])
