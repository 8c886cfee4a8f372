"""Compiles kernels ahead of time, so that a machine without nvcc can serve: `python -m engine.backend.compile --all`.

Knows which kernels a model's decode step needs. The result is the cache that engine.backend.nvcc reads; nothing runs
on a card here, and none has to be there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.backend import attention, lanes, launches, products
from engine.backend.launches import Heads
from engine.backend.nvcc import DEFAULT_CACHE_DIR, Kernel, KernelError, check_spills
from engine.backend.products import Ending
from engine.backend.wide import wide, wide_shape
from engine.config import ModelConfig
from engine.loader.random_shapes import SHAPES

_SHARED_PER_MULTIPROCESSOR = {"sm_80": 164 << 10, "sm_90a": 228 << 10}  # bytes
_ROWS = (1, 16, 32, 64, 128, 256)  # one for each cut that engine.backend.products knows
_HALVES = (96, 128, 192, 256)  # and for those of batches in two lanes
_WIDE = (128, 192, 256)  # and for those that engine.backend.wide knows


def step_kernels(config: ModelConfig, dtype: str, block_size: int, arch: str) -> Iterator[Kernel]:
    """All that a decode step of the model may launch on such a card."""
    shape = attention.AttentionShape(
        dtype, config.head_dim, config.num_heads // config.num_kv_heads, block_size, config.sliding_window or 0
    )
    hopper, shared = arch != "sm_80", _SHARED_PER_MULTIPROCESSOR[arch]
    geometry = attention.geometry(shape, shared)
    for one in (geometry, *(one for _, one in attention.geometries(shape, shared))):
        yield from attention.kernels(shape, one)
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, block_size, config.num_layers)
    hidden, inner = config.hidden_size, config.intermediate_size
    rooms = [(rows, products.WHOLE) for rows in _ROWS]
    _, attending = attention.step_launches(shape, geometry, 1)
    half = lanes.lane(hidden, attending, geometry.ctas, shared)
    if half is not None and hopper:
        rooms += [(rows, half[1]) for rows in _HALVES]
    for rows, room in rooms:
        for each in products.wanted(config):
            product = products.product(
                each.outputs, each.inputs, rows, dtype, each.ending, norm=each.norm,
                heads=heads if each.ending is Ending.ROPE else None, hopper=hopper, room=room,
            )  # fmt: skip
            if product is not None:
                yield product.launch.kernel
    for rows in _WIDE if hopper else ():
        if (cut := wide_shape(inner, hidden, rows, dtype)) is not None:
            yield wide(inner, rows, dtype, cut).kernel
    yield launches.rms_norm(hidden, 1, dtype).kernel
    yield launches.silu_mul(inner, 1, dtype).kernel
    yield launches.rope_write(heads, 1, dtype).kernel
    yield launches.gather_tiles(heads, 1, dtype).kernel
    for logits in dict.fromkeys(("float32", dtype)):
        yield launches.sample(config.vocab_size, 1, logits).kernel
        yield launches.logprobs(config.vocab_size, 1, logits).kernel
    yield launches.advance(config.vocab_size, block_size, 1).kernel
    yield launches.next_changes().kernel
    size = 4 if dtype == "float32" else 2
    tile = config.num_kv_heads * config.head_dim * block_size * size
    yield launches.copy_blocks(config.num_layers * 2 * tile, 1).kernel


def all_kernels(arch: str) -> list[Kernel]:
    """What CI compiles: the shapes of Llama-3-8B and SmolLM2, and attention of every head dim."""
    found: dict[Kernel, None] = {}
    for name, dtypes in (("llama3-8b", ("bfloat16",)), ("smollm2-135m", ("bfloat16", "float32"))):
        for dtype in dtypes:
            found |= dict.fromkeys(step_kernels(ModelConfig.from_dict(SHAPES[name]), dtype, 16, arch))
    for head_dim in attention.HEAD_DIMS:
        shape = attention.AttentionShape("float16", head_dim, 4, 16)
        chosen = attention.geometry(shape, _SHARED_PER_MULTIPROCESSOR[arch])
        found |= dict.fromkeys(attention.kernels(shape, chosen))
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.backend.compile", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="the shapes that CI compiles")
    what.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--arch", nargs="+", choices=sorted(_SHARED_PER_MULTIPROCESSOR), default=["sm_80", "sm_90a"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at work at once")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    chosen = parser.parse_args(arguments)
    for arch in chosen.arch:
        began = time.monotonic()
        try:
            if chosen.all:
                kernels = all_kernels(arch)
            else:
                config = ModelConfig.from_dir(chosen.model)
                kernels = list(dict.fromkeys(step_kernels(config, chosen.dtype, chosen.block_size, arch)))
            count = check_spills(kernels, arch, chosen.cache_dir, chosen.jobs)
        except (KernelError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{arch}: {count} kernels, no spills, {time.monotonic() - began:.0f} s, in {chosen.cache_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
