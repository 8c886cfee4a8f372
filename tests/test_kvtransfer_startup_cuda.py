"""A worker's start on an emulated card: what the pool gets, and what a user is told when the card cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedGpu

from decode_service.config import ROLE
from engine.types import SamplingParams
from kvtransfer import startup_cuda
from kvtransfer.startup import Engine, assemble
from pagewire.local_engine import LocalEngine
from wire.options import parse
from wire.worker import CannotStart

TOTAL = 1 << 30


class Card:
    """torch.cuda's memory, of which `free` bytes are left; a step takes 1 MiB."""

    free = TOTAL - (16 << 20)

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, TOTAL

    def memory_allocated(self) -> int:
        return 0

    def max_memory_allocated(self) -> int:
        return 1 << 20

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def is_available(self) -> bool:
        return True


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    for name in ("mem_get_info", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache",
                 "is_available"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(startup_cuda, "Gpu", EmulatedGpu)
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
    room = TOTAL // 2 - (16 << 20) - (1 << 20) - (256 << 20)
    assert engine.config.num_blocks == room // engine.layout.block_bytes
    tokens = engine.config.num_blocks * 16
    wanted = f"KV: {engine.config.num_blocks} blocks x 16 = {tokens} tokens, {tokens / 128:.1f} requests of 128 tokens"
    assert wanted in engine.description and "on an emulated card" in engine.description
    on_cpu = start(tmp_path, "--device", "cpu", "--kv-memory", "4MiB")
    assert tokens_of(engine) == tokens_of(on_cpu)


@pytest.mark.parametrize(
    ("argv", "free", "sentence"),
    [
        ((), 1000, "the weights take .* bytes in bfloat16, and of the GPU's .* bytes 1000 are free"),
        (
            ("--dtype", "float32", "--gpu-memory-utilization", "0.1"),
            None,
            "no room for 2 KV blocks .* raise --gpu-memory-utilization",
        ),
        (("--dtype", "float32", "--kv-memory", "2GiB"), None, "--kv-memory is 2147483648 bytes, a step takes"),
        (("--device", "cuda", "--row-tile", "8"), None, "--row-tile is the CPU's deterministic mode"),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_numbers(
    card: Card, tmp_path: Path, argv: tuple[str, ...], free: int | None, sentence: str
) -> None:
    if free is not None:
        card.free = free
    with pytest.raises(CannotStart, match=sentence):
        start(tmp_path, *argv)


def test_a_card_or_a_compiler_that_refuses_is_a_sentence(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.backend.nvcc import KernelError

    def refuse() -> Any:
        raise KernelError("a card of compute capability 7.0 is not supported; supported are 8.0, 9.0")

    monkeypatch.setattr(startup_cuda, "Gpu", refuse)
    with pytest.raises(CannotStart, match="7.0 is not supported; supported are"):
        start(tmp_path)


def test_without_a_gpu_auto_says_so_and_cuda_refuses(tmp_path: Path) -> None:
    said: list[str] = []
    start(tmp_path, "--kv-memory", "4MiB", said=said)
    assert "no CUDA GPU: running on the CPU" in said
    with pytest.raises(CannotStart, match="torch finds no CUDA GPU"):
        start(tmp_path, "--device", "cuda")


def test_the_card_and_its_share_are_flags(tmp_path: Path) -> None:
    options = parse(ROLE, ["--model", "m"], {})
    assert (options.device, options.gpu_memory_utilization, options.kv_memory) == ("cpu", 0.9, None)
