"""Products of 65 to 256 rows on Hopper against float64: every ending, several cuts, rows that end anywhere."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a CUDA device of compute capability 9", allow_module_level=True)

from test_kernels import EPS, LLAMA, Written, assert_close, normal, poisoned  # noqa: E402

from benchmarks.launcher import compile_all, run  # noqa: E402
from engine.backend.launches import Launch  # noqa: E402
from engine.backend.products import Ending  # noqa: E402
from engine.backend.tensor_map import tensor_map  # noqa: E402
from engine.backend.wide import WideShape, wide, wide_shape  # noqa: E402

pytestmark = pytest.mark.gpu

Case = tuple[int, int, Ending, bool]
PRODUCTS: list[Case] = [
    (4096, 4096, Ending.RESIDUAL, False),
    (4096, 14336, Ending.RESIDUAL, False),
    (14336, 4096, Ending.SILU, True),
    (14336, 4096, Ending.SILU, False),
    (6144, 4096, Ending.STORE, True),
    (6144, 4096, Ending.ROPE, True),
    (6144, 4096, Ending.ROPE, False),
]
ROWS = (65, 100, 128, 129, 192, 200, 256)


def launch_of(case: Case, rows: int, cut: WideShape, dtype: str) -> Launch:
    outputs, inputs, ending, norm = case
    heads = LLAMA if ending is Ending.ROPE else None
    return wide(outputs, inputs, rows, dtype, ending, cut, norm=norm, heads=heads)


def cuts(case: Case, rows: int) -> list[WideShape]:
    """The one that is chosen and, in a launch of several blocks of rows, one with other columns."""
    chosen = wide_shape(*case[:2], rows, case[2], "bfloat16")
    assert chosen is not None
    return [chosen] if case[2] is Ending.SILU or rows != 200 else [chosen, WideShape(128, 2, 2, 3, 2)]


CASES = [(case, dtype) for case in PRODUCTS for dtype in ("bfloat16", "float16")]


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_all(launch_of(case, rows, cut, dtype) for case, dtype in CASES for rows in ROWS for cut in cuts(case, rows))


def squares_of(x: torch.Tensor) -> torch.Tensor:
    """In pieces, as whoever wrote x leaves them."""
    return x.float().square().unflatten(1, (64, -1)).sum(-1).t().contiguous()


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_a_product_is_right_with_what_comes_before_and_after(case: Case, dtype: str) -> None:
    outputs, inputs, ending, norm = case
    halves = 2 if ending is Ending.SILU else 1
    weight = normal(outputs * halves, inputs, dtype=dtype, scale=inputs**-0.5)
    for rows, cut in [(each, cut) for each in ROWS for cut in cuts(case, each)]:
        workspace = poisoned(rows + 300, inputs, dtype=dtype)  # as those of an earlier step may be
        x = workspace[:rows].copy_(normal(rows, inputs, dtype=dtype, scale=3.0 if norm else 1.0))
        bias = normal(outputs, dtype=dtype) if rows % 2 and ending is not Ending.SILU else None
        wide_x = x.double()
        if norm:
            wide_x = wide_x / (wide_x.square().mean(-1, keepdim=True) + EPS).sqrt()
        product = wide_x @ weight.double().t()
        if bias is not None:
            product += bias.double()
        out, squares = poisoned(rows, outputs, dtype=dtype), squares_of(x) if norm else None
        if ending is Ending.RESIDUAL:
            out = normal(rows, outputs, dtype=dtype)
            squares = poisoned(outputs // cut.columns, rows)
            product += out.double()
        elif ending is Ending.SILU:
            gate, up = product.chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
        written = Written(LLAMA, rows, dtype) if ending is Ending.ROPE else None
        maps = tensor_map(weight, cut.outputs(ending)), tensor_map(workspace, cut.rows)
        rope = () if written is None else (written.arguments(),)
        pieces = 0 if squares is None else squares.shape[0]
        launch = launch_of(case, rows, cut, dtype)
        run(launch, *maps, bias, out, squares, rows, outputs, inputs // cut.inputs, pieces, EPS, *rope)
        if written is not None:
            written.check(product, out)
            continue
        assert_close(out, product, dtype)
        if ending is Ending.RESIDUAL and squares is not None:
            assert torch.allclose(squares.sum(0), out.float().square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("rows", [65, 128, 150, 256])
def test_overlapping_products_see_what_the_one_before_them_wrote(rows: int) -> None:
    """A chain in which each begins to read its weight while the one before it runs, and takes the squares it left."""
    case, after = (4096, 4096, Ending.RESIDUAL, False), (14336, 4096, Ending.SILU, True)
    weights = [normal(4096, 4096, dtype="bfloat16", scale=1 / 64) for _ in range(6)]
    gate_up = normal(28672, 4096, dtype="bfloat16", scale=1 / 64)
    [cut], [last] = cuts(case, rows), cuts(after, rows)
    x = normal(rows, 4096, dtype="bfloat16")
    results = []
    for overlap in (False, True, True, True):
        buffers = [x, *(torch.zeros_like(x) for _ in weights)]
        squares, out = poisoned(64, rows), poisoned(rows, 14336, dtype="bfloat16")
        for i, weight in enumerate(weights):
            maps = tensor_map(weight, 64), tensor_map(buffers[i], cut.rows)
            launch = launch_of(case, rows, cut, "bfloat16")
            run(launch, *maps, None, buffers[i + 1], squares, rows, 4096, 32, 0, EPS, overlap=overlap)
        maps = tensor_map(gate_up, 112), tensor_map(buffers[-1], last.rows)
        launch = launch_of(after, rows, last, "bfloat16")
        run(launch, *maps, None, out, squares, rows, 14336, 64, 64, EPS, overlap=overlap)
        torch.cuda.synchronize()
        results.append(out)
    assert not results[0].isnan().any()
    assert all(torch.equal(results[0], one) for one in results[1:])
