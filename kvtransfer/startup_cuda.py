"""An engine on a CUDA card: weights to the card, the pool from what is left, graphs recorded before the first request.

The pool gets what --gpu-memory-utilization allows after the weights and the peak of the longest prompt step, which is
run and measured. What the card or the user's settings make impossible becomes CannotStart, one sentence with numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.backend.cuda import CudaError, Gpu
from engine.backend.nvcc import KernelError
from engine.batch import Batch, Row, SampleInput
from engine.config import EngineConfig, ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_runner import CudaRunner
from engine.kv_cache import TORCH_DTYPES, kv_layout
from engine.loader import ModelSource, load_tensors
from engine.messages import KvLayout
from engine.models.llama import Llama
from engine.types import SamplingParams
from wire.options import WorkerOptions
from wire.worker import CannotStart

if TYPE_CHECKING:
    from torch import Tensor

Phases = Callable[[str, float], None]
_GRAPHS = 256 << 20  # bytes left for graphs and what libraries take beside them


def on_cuda(
    options: WorkerOptions, source: ModelSource, model: ModelConfig, longest: int, phases: Phases
) -> tuple[CudaRunner, EngineConfig, KvLayout, str]:
    """Runner, configuration, layout and what is served. `longest` is how many tokens a request may have."""
    try:
        return _on_cuda(options, source, model, longest, phases)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise CannotStart(
            f"the GPU's memory does not suffice ({free} of {total} bytes were free when it ran out): lower "
            f"--max-num-batched-tokens or --max-num-seqs, or use a smaller model"
        ) from error
    except (KernelError, CudaError, ValueError) as error:
        raise CannotStart(str(error)) from error


def _on_cuda(
    options: WorkerOptions, source: ModelSource, model: ModelConfig, longest: int, phases: Phases
) -> tuple[CudaRunner, EngineConfig, KvLayout, str]:
    if options.row_tile is not None:
        raise CannotStart("--row-tile is the CPU's deterministic mode: use it with --device cpu")
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    gpu = Gpu()
    numerics = f"torch {torch.__version__}, {gpu.name}"
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
    weights = Llama(model, _weights(source, model, dtype, gpu.device, phases))
    phases("measuring what a step needs", 0.0)
    blocks_of_a_step = -(-min(longest, options.max_num_batched_tokens) // options.block_size)
    memory = torch.empty(blocks_of_a_step * layout.block_bytes, dtype=torch.uint8, device=gpu.device)
    scratch = CudaKVCache(layout, blocks_of_a_step, gpu, memory)
    runner = CudaRunner(weights, config, scratch, gpu, graphs=options.role.name != "prefill")
    peak = _peak(runner, min(longest, options.max_num_batched_tokens))
    blocks = _blocks(options, layout, peak)
    phases(f"reserving {blocks} KV blocks", 0.0)
    config = replace(config, num_blocks=blocks)
    runner.use(CudaKVCache(layout, blocks, gpu), config)
    del scratch, memory
    torch.cuda.empty_cache()
    phases("compiling kernels and recording graphs", 0.0)
    runner.warm_up()
    gc.collect()
    gc.freeze()
    return runner, config, layout, f"{source.name}, {dtype} on {gpu.name}"


def _weights(source: ModelSource, model: ModelConfig, dtype: str, device: str, phases: Phases) -> dict[str, Tensor]:
    needed = model.num_parameters * TORCH_DTYPES[dtype].itemsize
    free, total = torch.cuda.mem_get_info()
    if needed > free:
        raise CannotStart(
            f"the weights take {needed} bytes in {dtype}, and of the GPU's {total} bytes {free} are free: a smaller "
            f"model, another --dtype or --device cpu may fit"
        )
    tensors = load_tensors(source, TORCH_DTYPES[dtype], phases)
    return {name: tensors.pop(name).to(device) for name in list(tensors)}


def _peak(runner: CudaRunner, tokens: int) -> int:
    """Bytes that one step over a prompt of so many tokens takes beyond what stays."""
    params = SamplingParams(temperature=0, seed=0, max_tokens=1)
    ids = [0] * tokens
    blocks = list(range(-(-tokens // runner.config.block_size)))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.step(Batch(rows=[Row(0, ids, 0, blocks, SampleInput(params, 0, ids, []))]))
    return torch.cuda.max_memory_allocated() - before


def _blocks(options: WorkerOptions, layout: KvLayout, peak: int) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = options.gpu_memory_utilization / options.workers_on_host
    if options.kv_memory is not None:
        if options.kv_memory + peak + _GRAPHS > free:
            raise CannotStart(
                f"--kv-memory is {options.kv_memory} bytes, a step takes {peak + _GRAPHS} more, and of the GPU's "
                f"{total} bytes {free} are free beside the weights"
            )
        room = options.kv_memory
    else:
        room = int(total * share) - (total - free) - peak - _GRAPHS
    blocks = room // layout.block_bytes
    if blocks < 2:
        used = total - free + peak + _GRAPHS
        raise CannotStart(
            f"weights and one step take {used} bytes of the GPU's {total}, of which this worker may use "
            f"{int(total * share)}: no room for 2 KV blocks of {layout.block_bytes} bytes; raise "
            f"--gpu-memory-utilization, or lower --max-num-batched-tokens"
        )
    return blocks
