"""Gate and up of 65 to 256 rows on Hopper against float64: every cut, rows that end anywhere."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a CUDA device of compute capability 9", allow_module_level=True)

from test_kernels import assert_close, normal, poisoned  # noqa: E402

from benchmarks.launcher import compile_all, run  # noqa: E402
from engine.backend.launches import rms_norm  # noqa: E402
from engine.backend.tensor_map import tensor_map  # noqa: E402
from engine.backend.wide import WideShape, wide, wide_shape  # noqa: E402

pytestmark = pytest.mark.gpu

PRODUCTS = [(14336, 4096), (3840, 4160), (6144, 8192), (10240, 4096)]  # outputs, inputs
ROWS = (65, 100, 128, 129, 192, 200, 256)
DTYPES = ("bfloat16", "float16")


def cut_of(outputs: int, inputs: int, rows: int) -> WideShape:
    cut = wide_shape(outputs, inputs, rows, "bfloat16")
    assert cut is not None
    return cut


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_all(
        wide(outputs, rows, dtype, cut_of(outputs, inputs, rows))
        for outputs, inputs in PRODUCTS
        for dtype in DTYPES
        for rows in ROWS
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), PRODUCTS)
def test_the_activation_of_a_product_is_right(outputs: int, inputs: int, dtype: str) -> None:
    weight = normal(2 * outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    for rows in ROWS:
        workspace = poisoned(rows + 300, inputs, dtype=dtype)  # as those of an earlier step may be
        x = workspace[:rows].copy_(normal(rows, inputs, dtype=dtype, scale=3.0))
        gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
        out, cut = poisoned(rows, outputs, dtype=dtype), cut_of(outputs, inputs, rows)
        maps = tensor_map(weight, cut.outputs), tensor_map(workspace, cut.rows)
        run(wide(outputs, rows, dtype, cut), *maps, out, rows, outputs, inputs // 64)
        assert_close(out, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("rows", [65, 128, 150, 256])
def test_a_product_that_begins_early_sees_what_the_norm_before_it_wrote(rows: int) -> None:
    weight = normal(28672, 4096, dtype="bfloat16", scale=1 / 64)
    gain, cut = normal(4096, dtype="bfloat16"), cut_of(14336, 4096, rows)
    results = []
    for overlap in (False, True, True, True):
        torch.manual_seed(rows)
        x, out = normal(rows, 4096, dtype="bfloat16"), poisoned(rows, 14336, dtype="bfloat16")
        h = torch.zeros_like(x)
        maps = tensor_map(weight, cut.outputs), tensor_map(h, cut.rows)
        run(rms_norm(4096, rows, "bfloat16"), x, None, gain, h, 1e-5, overlap=overlap)
        run(wide(14336, rows, "bfloat16", cut), *maps, out, rows, 14336, 64, overlap=overlap)
        torch.cuda.synchronize()
        results.append(out)
    assert not results[0].isnan().any()
    assert all(torch.equal(results[0], one) for one in results[1:])
