"""Products on Hopper's matrix units against float64: every ending and cut, rows that end anywhere, poisoned company."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a CUDA device of compute capability 9", allow_module_level=True)

from test_kernels import (  # noqa: E402
    ALL_HEADS,
    EPS,
    LLAMA,
    NARROW,
    Written,
    assert_close,
    name_of,
    normal,
    poisoned,
)  # fmt: skip

from benchmarks.launcher import compile_all, run  # noqa: E402
from engine.backend import products  # noqa: E402
from engine.backend.launches import Heads, Launch  # noqa: E402
from engine.backend.products import Ending, SkinnyShape  # noqa: E402
from engine.backend.tensor_map import tensor_map  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
Case = tuple[int, int, Ending, bool]
PRODUCTS: list[Case] = [
    (4096, 4096, Ending.RESIDUAL, False),
    (4096, 14336, Ending.RESIDUAL, False),
    (14336, 4096, Ending.SILU, True),
    (4096, 4096, Ending.STORE, False),
    (576, 576, Ending.RESIDUAL, False),
    (576, 1536, Ending.RESIDUAL, False),
    (1536, 576, Ending.SILU, True),
    (49152, 576, Ending.LOGITS, False),
    (1008, 768, Ending.STORE, True),  # tiles reach beyond the last output
    (1504, 768, Ending.SILU, True),
]
ROWS = (9, 17, 31, 32, 64, 100, 128, 129, 192, 256)
CUTS = [
    SkinnyShape(columns=16, tiles=1, groups=1, stages=2),
    SkinnyShape(columns=32, tiles=2, groups=2, stages=3, split=2),
    SkinnyShape(columns=64, tiles=2, groups=1, stages=2, split=3),
    SkinnyShape(columns=64, tiles=3, groups=3, stages=3),
    SkinnyShape(columns=128, tiles=2, groups=2, stages=2, split=3),
    SkinnyShape(columns=32, tiles=1, groups=1, stages=2, split=2, depth=2),
]


def fitting(case: Case, rows: int, dtype: str) -> list[SkinnyShape]:
    outputs, inputs, ending, _ = case
    chosen = None if ending is Ending.STORE else products.skinny_shape(outputs, inputs, rows, ending, dtype)
    if dtype == "float16" and rows not in (32, 128):
        return []
    cuts = CUTS if rows in (9, 129) and dtype == "bfloat16" and inputs < 4096 else []
    if ending is Ending.SILU:  # as many gate rows as up rows, in whole copies
        cuts = [cut for cut in cuts if cut.tiles != 3]
    return [cut for cut in (chosen, *cuts) if cut is not None and inputs % cut.inputs == 0]


def launch_of(case: Case, rows: int, dtype: str, cut: SkinnyShape) -> Launch:
    outputs, inputs, ending, norm = case
    return products.skinny(outputs, inputs, rows, dtype, ending, cut, norm=norm)


# Heads, inputs and rows; from 2048 inputs on the cuts are others.
ROPES = [(heads, 576, rows) for heads in ALL_HEADS for rows in (33, 200)]
ROPES += [(LLAMA, 4096, rows) for rows in (17, 32, 50, 100, 128)]


def rope_cuts(inputs: int, rows: int) -> list[SkinnyShape]:
    chosen = products.skinny_shape(960, inputs, rows, Ending.ROPE, "bfloat16")
    assert chosen is not None
    return [chosen, CUTS[0], CUTS[2]] if inputs == 576 else [chosen]


def rope_launch(heads: Heads, inputs: int, rows: int, cut: SkinnyShape) -> Launch:
    outputs = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    return products.skinny(outputs, inputs, rows, "bfloat16", Ending.ROPE, cut, norm=True, heads=heads)


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    wanted = [
        launch_of(case, rows, dtype, cut)
        for case in PRODUCTS for rows in ROWS for dtype in DTYPES for cut in fitting(case, rows, dtype)
    ]  # fmt: skip
    wanted += [rope_launch(*each, cut) for each in ROPES for cut in rope_cuts(*each[1:])]
    compile_all(wanted)


def with_company(rows: int, inputs: int, dtype: str, scale: float) -> torch.Tensor:
    """x as the first rows of a workspace whose others are NaN, as those of an earlier step may be."""
    workspace = poisoned(rows + 200, inputs, dtype=dtype)
    workspace[:rows] = normal(rows, inputs, dtype=dtype, scale=scale)
    return workspace


def unscaled(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PRODUCTS, ids=name_of)
def test_a_product_is_right_with_what_comes_before_and_after_however_it_is_cut(case: Case, dtype: str) -> None:
    outputs, inputs, ending, norm = case
    halves = 2 if ending is Ending.SILU else 1
    weight = normal(outputs * halves, inputs, dtype=dtype, scale=inputs**-0.5)
    for rows in ROWS:
        for cut in fitting(case, rows, dtype):
            bias = normal(outputs * halves, dtype=dtype) if rows % 2 else None
            workspace = with_company(rows, inputs, dtype, 3.0 if norm else 1.0)
            x = workspace[:rows]
            product = (unscaled(x) if norm else x.double()) @ weight.double().t()
            if bias is not None:
                product += bias.double()
            out = poisoned(rows, outputs, dtype="float32" if ending is Ending.LOGITS else dtype)
            if ending is Ending.RESIDUAL:
                out = normal(rows, outputs, dtype=dtype)
                product += out.double()
            elif ending is Ending.SILU:
                gate, up = product.chunk(2, -1)
                product = torch.nn.functional.silu(gate) * up
            maps = tensor_map(weight, products.weight_box(ending, cut)), tensor_map(workspace, cut.columns)
            launch = launch_of(case, rows, dtype, cut)
            run(launch, *maps, bias, out, rows, outputs, inputs // cut.inputs, EPS)
            assert_close(out, product, dtype)


@pytest.mark.parametrize(
    ("heads", "inputs", "rows"), ROPES, ids=[f"{heads.head_dim}-{inputs}-{rows}" for heads, inputs, rows in ROPES]
)
def test_a_product_may_end_with_rotation_and_kv_write(heads: Heads, inputs: int, rows: int) -> None:
    dtype = "bfloat16"
    outputs = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    for cut in rope_cuts(inputs, rows):
        weight, bias = normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5), normal(outputs, dtype=dtype)
        x = normal(rows, inputs, dtype=dtype)  # no company: boxes of x reach beyond all of it
        written, out = Written(heads, rows, dtype), poisoned(rows, outputs, dtype=dtype)
        product = unscaled(x) @ weight.double().t() + bias.double()
        maps = tensor_map(weight, 64), tensor_map(x, cut.columns)
        launch = rope_launch(heads, inputs, rows, cut)
        run(launch, *maps, bias, out, rows, outputs, inputs // cut.inputs, EPS, written.arguments())
        written.check(product, out)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_overlapping_products_see_what_the_one_before_them_wrote(rows: int) -> None:
    """A chain in which each begins to read its weight while the one before it runs."""
    weights = [normal(4096, 4096, dtype="bfloat16", scale=1 / 64) for _ in range(12)]
    cut = products.skinny_shape(4096, 4096, rows, Ending.RESIDUAL, "bfloat16")
    assert cut is not None
    launch = products.skinny(4096, 4096, rows, "bfloat16", Ending.RESIDUAL, cut)
    x = normal(rows, 4096, dtype="bfloat16")
    results = []
    for overlap in (False, True, True):
        buffers = [x, *(torch.zeros_like(x) for _ in weights)]
        for i, weight in enumerate(weights):
            maps = tensor_map(weight, 64), tensor_map(buffers[i], cut.columns)
            run(launch, *maps, None, buffers[i + 1], rows, 4096, 4096 // cut.inputs, EPS, overlap=overlap)
        torch.cuda.synchronize()
        results.append(buffers[-1])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_no_row_of_narrow_heads_is_written_twice() -> None:
    """Heads of 96 elements do not end with a tile of 64 outputs."""
    cut = CUTS[3]
    outputs = (NARROW.heads + 2 * NARROW.kv_heads) * NARROW.head_dim
    weight, x = normal(outputs, 576, dtype="bfloat16", scale=1 / 24), normal(40, 576, dtype="bfloat16")
    written, out = Written(NARROW, 40, "bfloat16"), poisoned(40, outputs, dtype="bfloat16")
    launch = rope_launch(NARROW, 576, 40, cut)
    maps = tensor_map(weight, 64), tensor_map(x, cut.columns)
    run(launch, *maps, None, out, 40, outputs, 576 // cut.inputs, EPS, written.arguments())
    written.check(unscaled(x) @ weight.double().t(), out)
