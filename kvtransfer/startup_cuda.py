"""An engine on a CUDA card: weights to the card, the pool from what is left, graphs recorded before the first request.

The pool gets what --gpu-memory-utilization allows after the weights and the peak of the longest prompt step, which is
run and measured. What the card or the user's settings make impossible becomes CannotStart, one sentence with numbers;
a card that cannot run the model at all is NoCard, which --device auto takes for a reason to use the CPU.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.backend import attention
from engine.backend.cuda import CudaError, Gpu
from engine.backend.nvcc import KernelError, architecture
from engine.batch import Batch, Row, SampleInput
from engine.config import EngineConfig, ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_runner import CudaRunner
from engine.kv_cache import TORCH_DTYPES, kv_layout
from engine.loader import ModelSource, load_tensors
from engine.messages import KvLayout
from engine.models.llama import Llama
from engine.types import SamplingParams
from kvtransfer.gpu_memory import Step, check_weights, pool_blocks, probe_blocks
from wire.garbage import spare_collections
from wire.options import WorkerOptions
from wire.worker import CannotStart

if TYPE_CHECKING:
    from torch import Tensor

Phases = Callable[[str, float], None]


class NoCard(Exception):
    """Why the model cannot run on a card here, a few words."""


def usable_card(options: WorkerOptions, model: ModelConfig) -> Gpu:
    """Raises NoCard. What the card has too little of, or does not manage later, is no such reason."""
    if not torch.cuda.is_available():
        built = "finds no CUDA GPU" if torch.version.cuda else "is built without CUDA"
        raise NoCard(f"torch {torch.__version__} {built}")
    try:
        architecture(*torch.cuda.get_device_capability())
        shape = attention.AttentionShape(
            _dtype(options), model.head_dim, model.num_heads // model.num_kv_heads, options.block_size,
            model.sliding_window or 0,
        )  # fmt: skip
        gpu = Gpu()
        attention.geometry(shape, gpu.shared_per_multiprocessor)
    except (KernelError, ValueError) as error:
        raise NoCard(str(error)) from error
    except ImportError as error:  # PyCUDA comes with an extra
        missing = isinstance(error, ModuleNotFoundError)
        said = f"the Python package {error.name} is not installed" if missing else f"PyCUDA does not load ({error})"
        raise NoCard(f"{said}: pip install 'pagewire[cuda]'") from error
    except torch.cuda.OutOfMemoryError as error:
        raise CannotStart(f"the GPU's memory is full before anything is loaded: {_first_line(error)}") from error
    except RuntimeError as error:  # of the driver, such as a card that another process has to itself
        raise NoCard(f"the GPU cannot be used: {_first_line(error)}") from error
    return gpu


def on_cuda(
    options: WorkerOptions, source: ModelSource, model: ModelConfig, longest: int, gpu: Gpu, phases: Phases
) -> tuple[CudaRunner, EngineConfig, KvLayout, str]:
    """Runner, configuration, layout and what is served. `longest` is how many tokens a request may have."""
    try:
        return _on_cuda(options, source, model, longest, gpu, phases)
    except torch.cuda.OutOfMemoryError as error:
        share = max(options.gpu_memory_utilization - 0.05, 0.05)
        raise CannotStart(
            f"the GPU's memory does not suffice: {_lacking(error)}; --gpu-memory-utilization {share:.2f} leaves more "
            f"beside the KV blocks, and a lower --max-num-seqs needs less"
        ) from error
    except (KernelError, CudaError) as error:
        raise CannotStart(str(error)) from error


def _on_cuda(
    options: WorkerOptions, source: ModelSource, model: ModelConfig, longest: int, gpu: Gpu, phases: Phases
) -> tuple[CudaRunner, EngineConfig, KvLayout, str]:
    dtype = _dtype(options)
    numerics = f"torch {torch.__version__}, {gpu.name}, kv digest by sums"
    if not options.kv_digest:  # both workers have to do without
        numerics += ", kv digest off"
    layout = kv_layout(model, source.digest, dtype, options.block_size, numerics)
    config = EngineConfig(
        block_size=options.block_size,
        num_blocks=2,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=longest,
        dtype=dtype,
        threads=options.threads,
    )
    weights = Llama(model, _weights(options, source, model, dtype, gpu.device, phases))
    phases("measuring what a step needs", 0.0)
    runner = _runner(weights, config, layout, gpu, options)
    step = _longest_step(runner, gpu, min(longest, options.max_num_batched_tokens))
    blocks = pool_blocks(options, layout, step)
    phases(f"reserving {blocks} KV blocks", 0.0)
    config = replace(config, num_blocks=blocks)
    runner.use(CudaKVCache(layout, blocks + probe_blocks(layout), gpu), config)
    phases("compiling kernels and recording graphs", 0.0)
    runner.cache.zero([0])  # compiles what moves blocks; warm_up does the rest
    runner.warm_up()
    spare_collections()
    return runner, config, layout, f"{source.name}, {dtype} on {gpu.name}"


def _dtype(options: WorkerOptions) -> str:
    return "bfloat16" if options.dtype == "auto" else options.dtype


def _weights(
    options: WorkerOptions, source: ModelSource, model: ModelConfig, dtype: str, device: str, phases: Phases
) -> dict[str, Tensor]:
    check_weights(options, model, dtype)
    tensors = load_tensors(source, TORCH_DTYPES[dtype], phases)
    return {name: tensors.pop(name).to(device) for name in list(tensors)}


def _runner(weights: Llama, config: EngineConfig, layout: KvLayout, gpu: Gpu, options: WorkerOptions) -> CudaRunner:
    """Over a pool of one block, until it is known how many there can be."""
    scratch = _scratch(layout, 1, gpu)
    try:
        return CudaRunner(weights, config, scratch, gpu, graphs=options.role.name != "prefill")
    except torch.cuda.OutOfMemoryError as error:
        row = 12 * weights.config.vocab_size  # counts, logits and the adjusted logits are most of what a sequence takes
        free, _ = torch.cuda.mem_get_info()
        most = free // row
        fits = f"--max-num-seqs {most} takes about {most * row}" if most else "a smaller model may fit"
        raise CannotStart(
            f"the state of --max-num-seqs {config.max_num_seqs} takes about {config.max_num_seqs * row} bytes of the "
            f"GPU beside the weights: {_lacking(error)}; {fits}"
        ) from error


def _longest_step(runner: CudaRunner, gpu: Gpu, tokens: int) -> Step:
    """What a step over a prompt of so many tokens takes. Where it does not fit, it is tried what does."""
    try:
        return Step(tokens, _peak(runner, gpu, tokens))
    except torch.cuda.OutOfMemoryError as error:
        lacking = _lacking(error)
    least = runner.config.block_size
    for fewer in (tokens >> halvings for halvings in range(1, tokens.bit_length())):
        if fewer < least:
            break
        torch.cuda.empty_cache()
        try:
            _peak(runner, gpu, fewer)
        except torch.cuda.OutOfMemoryError:
            continue
        raise CannotStart(
            f"the GPU's memory does not suffice for a step of {tokens} tokens beside the weights: {lacking}; "
            f"--max-num-batched-tokens {fewer} fits"
        )
    raise CannotStart(
        f"the GPU's memory does not suffice for a step of {least} tokens beside the weights: {lacking}; a smaller "
        f"model or --device cpu may fit"
    )


def _peak(runner: CudaRunner, gpu: Gpu, tokens: int) -> int:
    """Bytes that one step over a prompt of so many tokens takes beyond what stays."""
    blocks = list(range(-(-tokens // runner.config.block_size)))
    runner.use(_scratch(runner.layout, len(blocks), gpu), runner.config)
    params = SamplingParams(temperature=0, seed=0, max_tokens=1)
    ids = [0] * tokens
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        runner.step(Batch(rows=[Row(0, ids, 0, blocks, SampleInput(params, 0, ids, []))]))
        return torch.cuda.max_memory_allocated() - before
    finally:
        runner.use(_scratch(runner.layout, 1, gpu), runner.config)
        gc.collect()
        torch.cuda.empty_cache()


def _scratch(layout: KvLayout, blocks: int, gpu: Gpu) -> CudaKVCache:
    """A pool that can be given up: of torch's memory."""
    memory = torch.empty(blocks * layout.block_bytes, dtype=torch.uint8, device=gpu.device)
    return CudaKVCache(layout, blocks, gpu, memory)


def _lacking(error: torch.cuda.OutOfMemoryError) -> str:
    """What was needed and what there is."""
    free, total = torch.cuda.mem_get_info()
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    needed = f"{wanted[1]} more were needed, and " if wanted else ""
    return f"{needed}{free} of {total} bytes are free"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
