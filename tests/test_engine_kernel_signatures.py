"""What is launched is what the kernels of csrc/ take: numbers of arguments, their types, and structures' layouts."""

from __future__ import annotations

from typing import Any

import kernel_signatures as signatures
import pytest
import torch

from engine.backend import attention
from engine.backend.launches import Heads, Launch
from engine.backend.nvcc import SOURCES
from engine.backend.products import Ending
from engine.kv_cache import TORCH_DTYPES
from engine.models import cuda_products
from engine.models.cuda_products import Products

HEADS = Heads(heads=4, kv_heads=2, head_dim=64, block_size=16, layers=2)


class Recorder:
    clusters = True

    def __init__(self) -> None:
        self.launched: list[tuple[Launch, tuple[Any, ...]]] = []

    def launch(self, launch: Launch, *arguments: Any, overlap: bool = True) -> None:
        self.launched.append((launch, arguments))


@pytest.mark.parametrize(("file", "structure"), signatures.STRUCTURES)
def test_a_structure_is_packed_as_the_kernels_read_it(file: str, structure: str) -> None:
    assert signatures.fields(file, structure) == signatures.letters(signatures.STRUCTURES[file, structure])


def test_every_kernels_parameters_are_understood() -> None:
    known = {"int", "float", "long long", "int64_t", *signatures.SIZES}
    found = 0
    for file in SOURCES.glob("*.cu"):
        for function in signatures.functions(file.stem):
            kinds = signatures.parameters(file.stem, function, {"DTYPE": 1})
            assert all(kind in known or kind.endswith("*") for kind in kinds), (function, kinds)
            found += 1
    assert found > 15


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("hidden", "rows"), [(64, 1), (576, 40), (1024, 200), (2048, 12), (4096, 33), (4096, 128)])
def test_products_are_launched_with_what_their_kernels_take(
    hidden: int, rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[tuple[tuple[int, ...], int]] = []
    monkeypatch.setattr(
        cuda_products, "tensor_map", lambda matrix, box: (boxes.append((tuple(matrix.shape), box)), bytes(128))[1]
    )
    gpu: Any = Recorder()
    x = torch.empty(256, hidden, dtype=TORCH_DTYPES[dtype])
    products = Products(gpu, dtype, HEADS, 1e-5, [x])
    out, norm = torch.empty(1, dtype=x.dtype), torch.empty(hidden, dtype=x.dtype)
    found = 0
    for outputs, ending in ((512, Ending.ROPE), (hidden, Ending.RESIDUAL), (256, Ending.SILU), (1024, Ending.LOGITS)):
        weight = torch.empty(outputs * (2 if ending is Ending.SILU else 1), hidden, dtype=x.dtype).t()
        gain = norm if ending in (Ending.ROPE, Ending.SILU) else None
        rope = bytes(48) if ending is Ending.ROPE else None
        found += products.launch(gpu, weight, x[:rows], gain, None, out, ending, rope)
    assert len(gpu.launched) == found and (found > 0 or rows > 16)
    for launch, arguments in gpu.launched:
        signatures.check(launch, arguments)
    assert all(box <= 256 and matrix[1] == hidden for matrix, box in boxes)
    assert dtype != "float32" or not boxes


@pytest.mark.parametrize("rows", [65, 128, 192, 256])
def test_gate_and_up_in_one_wave_are_launched_with_what_the_kernel_takes(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[int] = []
    monkeypatch.setattr(cuda_products, "tensor_map", lambda matrix, box: (boxes.append(box), bytes(128))[1])
    gpu: Any = Recorder()
    heads = Heads(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=2)
    x, weight = torch.empty(256, 4096, dtype=torch.bfloat16), torch.empty(28672, 4096, dtype=torch.bfloat16)
    products = Products(gpu, "bfloat16", heads, 1e-5, [x])
    products.launch_wide(gpu, weight.t(), x[:rows], torch.empty(rows, 14336, dtype=x.dtype))
    [(launch, arguments)] = gpu.launched
    signatures.check(launch, arguments)
    assert boxes == [112, -(-rows // 64) * 64] and launch.grid == (128, 1)


def test_attention_alone_is_prepared_with_what_its_kernels_take() -> None:
    letters = {"int": "i", "float": "f", "int64_t": "q", "Ahead": "4x{AHEAD.size}s"}  # at a multiple of 8
    source = (SOURCES.parent / "engine" / "backend" / "attention.py").read_text()
    for file, function in (("plan", "plan_attention"), ("paged_attention", "paged_attention")):
        for dtype in range(2):
            kinds = signatures.parameters(file, function, {"DTYPE": dtype})
            expected = "".join("P" if kind.endswith("*") else letters[kind] for kind in kinds)
            assert f'"{expected}"' in source, expected
    assert attention.DTYPES[0] == "float32"


def test_a_launch_that_a_kernel_would_misread_is_noticed() -> None:
    launch = signatures.launches.silu_mul(64, 2, "bfloat16")
    both, out = torch.empty(2, 128, dtype=torch.bfloat16), torch.empty(2, 64, dtype=torch.bfloat16)
    signatures.check(launch, (both, out, 2))
    for wrong in ((both, out), (both, out, 2.0), (both.float(), out, 2), (both, 2, out), (both, out, 1 << 40)):
        with pytest.raises(AssertionError, match="silu_mul"):
            signatures.check(launch, wrong)
