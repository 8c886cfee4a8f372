"""What a card's memory allows: how many KV blocks beside weights and a step, and the sentence when it is too little.

A worker shares its card with the others of its host, so it counts what it holds itself, not what the card has in use;
what others really took bounds it too. Every refusal has what is needed, what there is, and the setting that would fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.kv_cache import TORCH_DTYPES
from engine.messages import KvLayout
from kvtransfer.probe import PROBE_BYTES_ON_CARD, spare_blocks
from wire.options import WorkerOptions
from wire.worker import CannotStart

_GRAPHS = 256 << 20  # bytes left for graphs and what libraries take beside them
_CONTEXT = 640 << 20  # bytes of a process's context and loaded code, at most
_LEAST = 2  # KV blocks with which a worker can work


@dataclass(frozen=True, slots=True)
class Step:
    """What the longest prompt step took, beyond what stays."""

    tokens: int
    peak: int  # bytes


def check_weights(options: WorkerOptions, model: ModelConfig, dtype: str) -> None:
    """Before they are read. Raises CannotStart."""
    needed = model.num_parameters * TORCH_DTYPES[dtype].itemsize
    free, total = torch.cuda.mem_get_info()
    allowed = _allowed(options, total)
    smaller = model.num_parameters * 2
    fits = "a smaller model or --device cpu may fit"
    if dtype == "float32" and smaller < min(free, allowed):
        fits = f"--dtype bfloat16 takes {smaller}"
    if needed > free:
        raise CannotStart(
            f"the weights take {needed} bytes in {dtype}, and of the GPU's {total} bytes {free} are free: {fits}"
        )
    if needed > allowed:
        raise CannotStart(
            f"the weights take {needed} bytes in {dtype}, and this worker may use {allowed} of the GPU's {total}: "
            f"{_more(options, needed + _GRAPHS, total) or fits}"
        )


def probe_blocks(layout: KvLayout) -> int:
    """How many the cache has behind its pool's."""
    return spare_blocks(layout.block_bytes, PROBE_BYTES_ON_CARD)


def pool_blocks(options: WorkerOptions, layout: KvLayout, step: Step) -> int:
    """As many as fit, or as --kv-memory asks for. Raises CannotStart."""
    free, total = torch.cuda.mem_get_info()
    held = min(total - free, torch.cuda.memory_reserved() + _CONTEXT)
    probes = probe_blocks(layout) * layout.block_bytes
    beside = step.peak + _GRAPHS + probes
    if options.kv_memory is not None:
        if options.kv_memory + beside > free:
            most = (free - beside) // layout.block_bytes * layout.block_bytes
            fits = f"; --kv-memory {most} fits" if most >= _LEAST * layout.block_bytes else ""
            raise CannotStart(
                f"--kv-memory is {options.kv_memory} bytes, a step takes {beside} more, and of the GPU's {total} bytes "
                f"{free} are free beside the weights{fits}"
            )
        room = options.kv_memory
    else:
        room = min(_allowed(options, total) - held, free) - beside
    blocks = room // layout.block_bytes
    if blocks < _LEAST:
        least = _LEAST * layout.block_bytes
        if options.kv_memory is not None:
            raise CannotStart(f"--kv-memory is {options.kv_memory} bytes; {_LEAST} KV blocks, the least, take {least}")
        raise CannotStart(
            f"weights and one step take {held + beside} bytes of the GPU's {total}, of which {free} are free and this "
            f"worker may use {_allowed(options, total)}: no room for {_LEAST} KV blocks of {layout.block_bytes} bytes; "
            f"{_fitting(options, step, held, least + probes, free, total)}"
        )
    return blocks


def _fitting(options: WorkerOptions, step: Step, held: int, least: int, free: int, total: int) -> str:
    """The setting with which it would start."""
    beside = step.peak + _GRAPHS
    if beside + least <= free and (more := _more(options, held + beside + least, total)):
        return more
    room = min(_allowed(options, total) - held, free) - _GRAPHS - least
    tokens = step.tokens * room // max(step.peak, 1)  # a step takes memory in proportion to its tokens
    if tokens >= options.block_size:
        return f"--max-num-batched-tokens {tokens} fits"
    return "a smaller model, fewer --max-num-seqs or --device cpu may fit"


def _more(options: WorkerOptions, needed: int, total: int) -> str:
    """Empty if no share of the card is enough."""
    share = math.ceil(100 * needed * options.workers_on_host / total) / 100
    return f"--gpu-memory-utilization {share:.2f} fits" if share <= 1 else ""


def _allowed(options: WorkerOptions, total: int) -> int:
    return int(total * options.gpu_memory_utilization / options.workers_on_host)
