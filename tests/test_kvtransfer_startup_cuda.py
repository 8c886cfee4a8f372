"""A worker's start on an emulated card: what the pool gets, and what a user is told when the card cannot serve."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedGpu

from decode_service.config import ROLE
from engine.backend.nvcc import KernelError
from engine.batch import Batch
from engine.config import ModelConfig
from engine.cuda_runner import CudaRunner
from engine.loader.random_shapes import SHAPES
from engine.types import SamplingParams
from kvtransfer import gpu_memory, startup_cuda
from kvtransfer.startup import Engine, assemble
from pagewire.local_engine import LocalEngine
from wire.options import ON_CPU, parse
from wire.worker import CannotStart

TOTAL = 1 << 30


class Card:
    """torch.cuda's memory: `free` bytes are left, `reserved` are torch's; a step of more than `longest` tokens does not
    fit, one that fits takes `peak`."""

    free = TOTAL - (16 << 20)
    reserved = 16 << 20
    peak = 1 << 20
    longest = 1 << 30
    capability = (9, 0)

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, TOTAL

    def memory_allocated(self) -> int:
        return 0

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_reserved(self) -> int:
        return self.reserved

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def is_available(self) -> bool:
        return True

    def get_device_capability(self) -> tuple[int, int]:
        return self.capability


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    for name in ("mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "empty_cache",
                 "reset_peak_memory_stats", "is_available", "get_device_capability"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(startup_cuda, "Gpu", EmulatedGpu)
    monkeypatch.setattr(gpu_memory, "_CONTEXT", 16 << 20)
    submit = CudaRunner.submit

    def submit_if_it_fits(runner: CudaRunner, batch: Batch) -> Any:
        if batch.num_tokens > found.longest:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
        return submit(runner, batch)

    monkeypatch.setattr(CudaRunner, "submit", submit_if_it_fits)
    return found


def start(cache_dir: Path, *argv: str, said: list[str] | None = None) -> Engine:
    flags = ["--model", "random:tiny", "--cache-dir", str(cache_dir), "--device", "auto"]
    flags += ["--max-num-seqs", "4", "--max-model-len", "128"]
    options = parse(ROLE, [*flags, *argv], {})
    return assemble(options, (said if said is not None else []).append)


def tokens_of(engine: Engine) -> list[int]:
    local = LocalEngine(engine.runner, engine.config)
    local.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    found: list[int] = []
    while local.has_work:
        found += [token.token_id for _, token, _ in local.step()]
    return found


def test_the_pool_gets_what_the_share_leaves_after_weights_and_a_step(card: Card, tmp_path: Path) -> None:
    engine = start(tmp_path, "--dtype", "float32", "--gpu-memory-utilization", "0.5")
    room = TOTAL // 2 - (16 << 20) - (1 << 20) - (256 << 20) - PROBES
    assert engine.config.num_blocks == room // engine.layout.block_bytes
    tokens = engine.config.num_blocks * 16
    wanted = f"KV: {engine.config.num_blocks} blocks x 16 = {tokens} tokens, {tokens / 128:.1f} requests of 128 tokens"
    assert wanted in engine.description and "on an emulated card" in engine.description
    on_cpu = start(tmp_path, "--device", "cpu", "--kv-memory", "4MiB")
    assert tokens_of(engine) == tokens_of(on_cpu)


PROBES = 256 << 15  # bytes of the probe blocks
BIG = ("--dtype", "float32", "--kv-memory", "2GiB")
SMALL_SHARE = ("--dtype", "float32", "--gpu-memory-utilization", "0.1")


@pytest.mark.parametrize(
    ("argv", "changes", "sentence"),
    [
        (
            (),
            {"free": 1000},
            "the weights take .* bytes in bfloat16, and of the GPU's .* 1000 are free: a smaller",
        ),
        (
            ("--dtype", "float32"),
            {"free": 2_000_000},
            "the weights take 2[0-9]+ .*: --dtype bfloat16 takes 1[0-9]+$",
        ),
        (
            ("--dtype", "float32", "--gpu-memory-utilization", "0.001"),
            {},
            "and this worker may use 1073741 of the GPU's 1073741824: --dtype bfloat16 takes|--gpu-memory-utilization",
        ),
        (SMALL_SHARE, {}, "no room for 2 KV blocks .*; --gpu-memory-utilization 0.28 fits$"),
        ((*SMALL_SHARE, "--workers-on-host", "3"), {}, "may use 35791394: .*; --gpu-memory-utilization 0.83 fits$"),
        (
            ("--dtype", "float32"),
            {"peak": 1 << 30},
            "weights and one step take 13673.* bytes of the GPU's .* free .*; --max-num-batched-tokens 40 fits$",
        ),
        (BIG, {}, "--kv-memory is 2147483648 bytes, a step takes 277872640 more, .* beside the weights; --kv-memory 7"),
        (("--dtype", "float32", "--kv-memory", "4KiB"), {}, "is 4096 bytes; 2 KV blocks, the least, take 65536"),
        (
            ("--dtype", "float32"),
            {"longest": 40},
            "a step of 64 tokens .*: 20.00 MiB more were needed, and .* are free; --max-num-batched-tokens 32 fits$",
        ),
        (("--dtype", "float32"), {"longest": 1}, "a step of 16 tokens .* a smaller model or --device cpu may fit$"),
        (("--device", "cuda", "--row-tile", "8"), {}, "--row-tile is the CPU's deterministic mode"),
        (
            ("--device", "cuda"),
            {"capability": (7, 5)},
            "7.5 is not supported; supported are 8.0, .*9.0; --device",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_numbers_and_the_setting_that_fits(
    card: Card, tmp_path: Path, argv: tuple[str, ...], changes: dict[str, Any], sentence: str
) -> None:
    for name, value in changes.items():
        setattr(card, name, value)
    with pytest.raises(CannotStart, match=sentence) as caught:
        start(tmp_path, *argv)
    assert "\n" not in str(caught.value)


def test_the_setting_that_a_refusal_names_does_fit(card: Card, tmp_path: Path) -> None:
    start(tmp_path, *SMALL_SHARE, "--gpu-memory-utilization", "0.28")
    card.longest = 40
    start(tmp_path, "--dtype", "float32", "--max-num-batched-tokens", "32")
    card.longest, card.peak = 1 << 30, 40 << 24
    start(tmp_path, "--dtype", "float32", "--max-num-batched-tokens", "40")


def test_workers_that_share_a_card_leave_each_other_their_part(card: Card, tmp_path: Path) -> None:
    """The first has its pool when the second counts: what the first took is not the second's."""
    flags = ("--dtype", "float32", "--workers-on-host", "2")
    first = start(tmp_path, *flags)
    card.reserved = 0
    card.free -= first.config.num_blocks * first.layout.block_bytes
    second = start(tmp_path, *flags)
    both = (first.config.num_blocks + second.config.num_blocks) * first.layout.block_bytes
    assert second.config.num_blocks > 0 and both <= 0.9 * TOTAL


def test_a_kernel_that_does_not_compile_is_the_compilers_first_error(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(gpu: EmulatedGpu, kernels: Any) -> None:
        raise KernelError('rope.cu does not compile for sm_90a: rope.cu:3: identifier "x" is undefined')

    monkeypatch.setattr(EmulatedGpu, "compile", refuse)
    with pytest.raises(
        CannotStart, match='^rope.cu does not compile for sm_90a: rope.cu:3: identifier "x" is undefined'
    ):
        start(tmp_path, "--dtype", "float32")


def refusing(error: Exception) -> Any:
    def refuse() -> Any:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module", name="pycuda"), "package pycuda is not installed: pip install 'pagewire"),
        (ImportError("libcuda.so.1: no such file"), r"PyCUDA does not load \(libcuda.so.1: no such file\)"),
        (RuntimeError("CUDA error: busy\nCompile with"), "the GPU cannot be used: CUDA error: busy"),
    ],
)
def test_auto_takes_the_cpu_where_the_card_cannot_be_used_and_says_why(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(startup_cuda, "Gpu", refusing(error))
    said: list[str] = []
    engine = start(tmp_path, "--kv-memory", "4MiB", said=said)
    assert engine.ahead is None and "float32 on the CPU" in engine.description
    (line,) = [line for line in said if line.startswith(ON_CPU)]
    assert re.search(f"^running on the CPU: .*{reason}", line) and "\n" not in line
    with pytest.raises(CannotStart, match=f"^--device cuda: .*{reason}.*; --device cpu and auto run on the CPU$"):
        start(tmp_path, "--device", "cuda")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 80}, "head dim 80 is not supported on CUDA; supported are 64, 96, 128, 256"),
        ({"head_dim": 512}, "head dim 512 is not supported on CUDA"),
    ],
)
def test_a_head_size_without_a_kernel_is_named_with_those_that_have_one(
    card: Card, changes: dict[str, Any], sentence: str
) -> None:
    options = parse(ROLE, ["--model", "m", "--device", "cuda"], {})
    model = replace(ModelConfig.from_dict(SHAPES["tiny"]), **changes)
    with pytest.raises(startup_cuda.NoCard, match=sentence):
        startup_cuda.usable_card(options, model)


def test_without_a_gpu_auto_says_so_and_cuda_refuses(tmp_path: Path) -> None:
    said: list[str] = []
    start(tmp_path, "--kv-memory", "4MiB", said=said)
    (line,) = [line for line in said if line.startswith(ON_CPU)]
    assert re.search("^running on the CPU: torch .* (finds no CUDA GPU|is built without CUDA)$", line)
    with pytest.raises(CannotStart, match="--device cuda: torch .*; --device cpu and auto run on the CPU"):
        start(tmp_path, "--device", "cuda")


def test_the_card_and_its_share_are_flags(tmp_path: Path) -> None:
    options = parse(ROLE, ["--model", "m"], {})
    assert (options.device, options.gpu_memory_utilization, options.kv_memory) == ("auto", 0.9, None)
