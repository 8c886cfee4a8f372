"""From a worker's options to an engine that can step: find the model, size the pool, read the weights.

Runs on the device thread and is the first to import torch, so that the process answers health meanwhile. What a user
got wrong becomes CannotStart, one sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from engine.batch import Batch, Row, SampleInput
from engine.config import EngineConfig, ModelConfig, ModelError
from engine.messages import KvLayout, Node, TransportOffer, WorkerHello
from engine.shared_memory import SharedMemory
from engine.types import SamplingParams
from kvtransfer.probe import spare_blocks
from kvtransfer.transports.hands import stand_back
from wire.options import ON_CPU, WorkerOptions
from wire.worker import CannotStart

if TYPE_CHECKING:
    from engine.backend.cuda import Gpu
    from engine.cuda_runner import CudaRunner
    from engine.fake_runner import FakeRunner
    from engine.loader import ModelSource
    from engine.runner import ModelRunner

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_MEMORY = 2**30  # bytes, on the CPU
Say = Callable[[str], None]
Assemble = Callable[[WorkerOptions, Say], "Engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    runner: ModelRunner | FakeRunner | CudaRunner
    config: EngineConfig
    layout: KvLayout
    description: str  # what is served, in a few words
    memory: SharedMemory | None = None  # its KV blocks, where decode workers of this host may read them
    ahead: CudaRunner | None = None  # the runner, if it takes several steps before the first is read

    @property
    def depth(self) -> int:
        return 1 if self.ahead is None else self.ahead.depth

    @property
    def on_card(self) -> bool:
        return self.ahead is not None

    @property
    def spare(self) -> range:
        """Blocks of the cache that are not the pool's: the probe's (kvtransfer.probe)."""
        return range(self.config.num_blocks, self.runner.cache.num_blocks)

    def hello(self, node: Node, transports: Sequence[TransportOffer]) -> WorkerHello:
        config = self.config
        return WorkerHello(
            node, self.layout, config.num_blocks, config.max_num_seqs, config.max_model_len, tuple(transports)
        )


def assemble_worker(options: WorkerOptions, say: Say) -> Engine:
    """As assemble, in a process that is a worker and nothing else: without a card it gives way to the router."""
    engine = assemble(options, say)
    if not engine.on_card:
        stand_back()
    return engine


def assemble(options: WorkerOptions, say: Say) -> Engine:
    """In a worker's process or a user's own."""
    from engine.loader import resolve_model

    phases = _Phases(say)
    try:
        phases("finding the model", 0.0)
        source = resolve_model(options.model, phases, options.cache_dir)
        return _with_torch(options, source, ModelConfig.from_dir(source.dir), phases)
    except (ModelError, OSError) as error:
        raise CannotStart(str(error)) from error


class _Phases:
    """One line when a phase begins, and one a second while it lasts."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._phase = ""
        self._said_at = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if phase != self._phase or now - self._said_at >= 1.0:
            self._say(f"{phase}: {fraction:.0%}" if phase == self._phase else phase)
            self._phase, self._said_at = phase, now


def _with_torch(options: WorkerOptions, source: ModelSource, model: ModelConfig, phases: _Phases) -> Engine:
    phases("loading torch", 0.0)
    import torch

    torch.set_num_threads(options.threads)
    card = chosen_card(options, model)
    if isinstance(card, str):
        return _on_cpu(options, source, model, phases, card)
    from kvtransfer.startup_cuda import on_cuda

    runner, config, layout, where = on_cuda(options, source, model, longest_request(options, model), card, phases)
    return Engine(runner, config, layout, f"{where}, {_room(config)}", ahead=runner)


def chosen_card(options: WorkerOptions, model: ModelConfig) -> Gpu | str:
    """The card to run on; else why the CPU serves, in a few words, and "" if that was asked for. Raises CannotStart."""
    if options.device == "cpu":
        return ""
    if options.row_tile is not None:
        if options.device == "auto":
            return "--row-tile is its deterministic mode"
        raise CannotStart("--row-tile is the CPU's deterministic mode: use it with --device cpu")
    from kvtransfer import startup_cuda

    try:
        return startup_cuda.usable_card(options, model)
    except startup_cuda.NoCard as reason:
        if options.device == "cuda":
            raise CannotStart(f"--device cuda: {reason}; --device cpu and auto run on the CPU") from reason
        return str(reason)


def _room(config: EngineConfig) -> str:
    tokens = config.num_blocks * config.block_size
    at_once = tokens / config.max_model_len
    return (
        f"KV: {config.num_blocks} blocks x {config.block_size} = {tokens} tokens, "
        f"{at_once:.1f} requests of {config.max_model_len} tokens at once"
    )


def _on_cpu(options: WorkerOptions, source: ModelSource, model: ModelConfig, phases: _Phases, reason: str) -> Engine:
    """`reason`: why not on a card, if --device left it open."""
    import torch

    from engine.backend.cpu import CPUBackend
    from engine.kv_cache import TORCH_DTYPES, KVCache, kv_layout
    from engine.loader import load_tensors
    from engine.models.llama import Llama
    from engine.runner import ModelRunner

    if reason:
        phases(f"{ON_CPU}: {reason}", 0.0)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    # Threads are not part of it: a row tile makes the bits independent of them, and without one they are not compared.
    capability = torch.backends.cpu.get_cpu_capability()
    numerics = f"torch {torch.__version__}, {capability}, row tile {options.row_tile or 'off'}"
    if not options.kv_digest:  # both workers have to do without
        numerics += ", kv digest off"
    layout = kv_layout(model, source.digest, dtype, options.block_size, numerics)
    config = engine_config(options, model, layout)
    weights = Llama(model, load_tensors(source, TORCH_DTYPES[dtype], phases))
    phases(f"reserving {config.num_blocks} KV blocks", 0.0)
    shared = options.role.name != "decode" and options.transport != "grpc"
    with_spare = config.num_blocks + spare_blocks(layout.block_bytes)
    memory = SharedMemory(with_spare * layout.block_bytes) if shared else None
    runner = ModelRunner(weights, config, KVCache(layout, with_spare, memory=memory), CPUBackend())
    phases("warming up", 0.0)
    _warm_up(runner)
    description = f"{source.name}, {dtype} on the CPU, {options.threads} threads, {_room(config)}"
    return Engine(runner, config, layout, description, memory)


def engine_config(options: WorkerOptions, model: ModelConfig, layout: KvLayout) -> EngineConfig:
    """Measured facts: how many blocks the memory holds, and how long a request may be. Raises CannotStart."""
    memory = KV_MEMORY if options.kv_memory is None else options.kv_memory
    blocks = memory // layout.block_bytes
    total = psutil.virtual_memory().total
    if memory > total:
        raise CannotStart(f"--kv-memory is {memory} bytes and this machine has {total}")
    weights = model.num_parameters * BYTES[layout.dtype]
    if weights + memory > total:
        raise CannotStart(
            f"the weights take {weights} bytes in {layout.dtype} and --kv-memory {memory}, "
            f"and this machine has {total}: a smaller model, or another --dtype, may fit"
        )
    if blocks < 2:
        raise CannotStart(
            f"--kv-memory of {memory} bytes holds {blocks} KV blocks of {layout.block_bytes} bytes; "
            f"at least {2 * layout.block_bytes} are needed"
        )
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=longest_request(options, model),
        dtype=layout.dtype,
        row_tile=options.row_tile,
        threads=options.threads,
    )


def longest_request(options: WorkerOptions, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > longest:
        raise CannotStart(f"--max-model-len is {options.max_model_len} and the model takes at most {longest}")
    return options.max_model_len or longest


def _warm_up(runner: ModelRunner) -> None:
    """One short step, so that the first request does not pay for what libraries set up lazily."""
    params = SamplingParams(temperature=0, seed=0, max_tokens=1)
    tokens = [0] * 8
    row = Row(0, tokens, 0, [0], SampleInput(params, 0, tokens, []))
    runner.step(Batch(rows=[row], zero_blocks=[0]))
