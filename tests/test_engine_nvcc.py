"""The cache of compiled kernels: what a user meets with and without nvcc, and when a kernel does not compile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.backend import nvcc
from engine.backend.compile import all_kernels, main
from engine.backend.launches import ROPE_ARGS, ROW_STATE, SAMPLE_ROW, Heads
from engine.backend.nvcc import Kernel, KernelError, architecture, check_spills, cubin, kernel, usages
from engine.backend.products import Ending, gemv, product, skinny_shape

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

SOURCE = """
#include "{header}"
extern "C" __global__ void twice(int* v) {{ v[threadIdx.x] *= FACTOR; }}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ of its own with one kernel, `twice`, and one header."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "shared.cuh").write_text("// nothing yet\n")
    (folder / "twice.cu").write_text(SOURCE.format(header="shared.cuh"))
    monkeypatch.setattr(nvcc, "SOURCES", folder)
    return folder


def counting_nvcc(folder: Path) -> tuple[Path, Path]:
    """A compiler that writes its output file at once and a line per call."""
    calls = folder / "calls"
    script = folder / "fake-nvcc"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do shift; done\necho cubin > "$2"\n')
    script.chmod(0o755)
    return script, calls


def test_without_nvcc_and_without_a_cubin_one_sentence_names_both_ways_out(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelError) as error:
        cubin(kernel("twice", FACTOR=2), "sm_90a", tmp_path / "cache", nvcc="no-such-nvcc")
    message = str(error.value)
    assert "twice.cu FACTOR=2" in message and "install CUDA's nvcc" in message
    assert "pagewire compile" in message and str(tmp_path / "cache") in message
    assert "\n" not in message


def test_a_cubin_compiled_before_needs_no_nvcc(sources: Path, tmp_path: Path) -> None:
    compiler, calls = counting_nvcc(tmp_path)
    wanted = kernel("twice", FACTOR=2)
    first = cubin(wanted, "sm_90a", tmp_path / "cache", str(compiler))
    assert cubin(wanted, "sm_90a", tmp_path / "cache", "no-such-nvcc") == first
    assert first.read_text() == "cubin\n"
    assert len(calls.read_text().splitlines()) == 1


def test_the_compiler_of_nvidias_python_packages_needs_no_path(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calls = counting_nvcc(tmp_path)
    folder = tmp_path / "site" / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    shutil.copy(tmp_path / "fake-nvcc", folder / "nvcc-of-a-wheel")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    cubin(kernel("twice", FACTOR=2), "sm_90a", tmp_path / "cache", "nvcc-of-a-wheel")
    assert len(calls.read_text().splitlines()) == 1


def test_settings_cards_sources_and_headers_have_cubins_of_their_own(sources: Path, tmp_path: Path) -> None:
    compiler, _ = counting_nvcc(tmp_path)

    def name(arch: str = "sm_90a", **settings: int) -> str:
        return cubin(kernel("twice", **settings), arch, tmp_path / "cache", str(compiler)).name

    names = [name(FACTOR=2), name(FACTOR=3), name("sm_80", FACTOR=2)]
    (sources / "shared.cuh").write_text("// an edit\n")
    names.append(name(FACTOR=2))
    (sources / "twice.cu").write_text(SOURCE.format(header="shared.cuh") + "// an edit\n")
    names.append(name(FACTOR=2))
    assert len(set(names)) == 5
    assert name(FACTOR=2) == names[-1]


def test_processes_that_want_one_kernel_compile_it_once(sources: Path, tmp_path: Path) -> None:
    compiler, calls = counting_nvcc(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda _: cubin(kernel("twice", FACTOR=2), "sm_90a", tmp_path / "cache", str(compiler)), range(8))
        )
    assert len(set(found)) == 1
    assert len(calls.read_text().splitlines()) == 1


def test_a_compiler_that_fails_leaves_nothing_behind(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-nvcc"
    compiler.write_text(
        '#!/bin/sh\necho "$PWD/csrc/twice.cu(3): error: identifier "FACTOR" is undefined" >&2\nexit 2\n'
    )
    compiler.chmod(0o755)
    with pytest.raises(KernelError, match=r"does not compile for sm_90a: twice.cu:3: identifier FACTOR is undefined$"):
        cubin(kernel("twice"), "sm_90a", tmp_path / "cache", str(compiler))
    assert not list((tmp_path / "cache").glob("*.cubin"))
    assert not [one for one in (tmp_path / "cache").iterdir() if one.is_dir()]


def test_an_unknown_kernel_or_card_is_told_what_there_is(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="there is no kernel 'thrice' in .*, which has twice"):
        cubin(Kernel("thrice"), "sm_90a", tmp_path)
    with pytest.raises(KernelError, match=r"compute capability 7.5 is not supported; supported are 8.0, .*9.0"):
        architecture(7, 5)
    assert architecture(9, 0) == "sm_90a" and architecture(8, 6) == "sm_80"


def test_compiling_needs_neither_torch_nor_pycuda() -> None:
    program = "import sys, engine.backend.nvcc; sys.exit(' '.join({'torch', 'pycuda'} & set(sys.modules)) or 0)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ran.returncode == 0, ran.stderr


@needs_nvcc
def test_a_real_compiler_reports_registers_and_its_first_error(sources: Path, tmp_path: Path) -> None:
    compiled = cubin(kernel("twice", FACTOR=2), "sm_90a", tmp_path / "cache")
    assert compiled.read_bytes()[:4] == b"\x7fELF"
    assert [(usage.function, usage.spilled) for usage in usages(compiled)] == [("twice", 0)]
    assert check_spills([kernel("twice", FACTOR=2)], "sm_90a", tmp_path / "cache") == 1
    with pytest.raises(KernelError, match=r'^twice.cu does not compile for sm_90a: twice.cu:3: identifier "FACTOR" is'):
        cubin(kernel("twice"), "sm_90a", tmp_path / "cache")


@needs_nvcc
def test_spilled_registers_are_named(sources: Path, tmp_path: Path) -> None:
    lines = ['extern "C" __global__ void __launch_bounds__(1024) greedy(const float* in, float* out) {']
    lines += [f"float v{i} = in[{i} * 1024 + threadIdx.x];" for i in range(120)]
    lines += ["__syncthreads();"]
    lines += [f"out[{i} * 1024 + threadIdx.x] = v{i} * v{(i * 7 + 1) % 120};" for i in range(120)]
    (sources / "greedy.cu").write_text("\n".join([*lines, "}"]))
    with pytest.raises(KernelError, match=r"greedy.cu for sm_90a: greedy spills \d+ bytes of registers"):
        check_spills([kernel("greedy")], "sm_90a", tmp_path / "cache")


def test_structures_have_the_sizes_that_the_kernels_expect() -> None:
    assert (ROPE_ARGS.size, SAMPLE_ROW.size, ROW_STATE.size) == (48, 64, 88)


def test_a_product_is_cut_so_that_every_output_and_row_is_covered() -> None:
    heads = Heads(32, 8, 128, 16, 32)
    for outputs, ending in ((6144, Ending.ROPE), (4096, Ending.RESIDUAL), (14336, Ending.SILU), (576, Ending.STORE)):
        for rows in (1, 8, 9, 32, 33, 256):
            for dtype in ("float32", "bfloat16"):
                launch = gemv(outputs, 4096, rows, dtype, ending, heads=heads if ending is Ending.ROPE else None)
                settings = dict(launch.kernel.settings)
                tiles = settings["TILES"] // (2 if ending is Ending.SILU else 1)
                per_block = 2 * settings["WARPS"] if dtype == "float32" else 16 * tiles
                assert launch.grid[0] * per_block >= outputs > (launch.grid[0] - 1) * per_block
                assert launch.grid[1] * settings["M_TILES"] * 8 >= rows
                assert launch.block == 32 * settings["WARPS"] and launch.shared <= 227 << 10


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 257, 512])
def test_a_product_of_any_model_gets_a_cut_that_its_kernel_can_run(rows: int) -> None:
    heads = Heads(heads=8, kv_heads=2, head_dim=64, block_size=16, layers=2)
    found = 0
    for inputs in (64, 128, 320, 576, 960, 1024, 1152, 1536, 1984, 2048, 2560, 4096, 5120, 8192, 14336):
        for ending in (Ending.RESIDUAL, Ending.SILU, Ending.ROPE, Ending.LOGITS):
            outputs, writes = (768, heads) if ending is Ending.ROPE else (4096, None)
            chosen = product(outputs, inputs, rows, "bfloat16", ending, norm=True, heads=writes, hopper=True)
            if chosen is None or chosen.shape is None:
                continue
            found += 1
            launch, shape = chosen.launch, chosen.shape
            assert launch.shared <= 227 << 10 and launch.shared >= shape.stages * shape.inputs // shape.split * 128
            assert launch.block == 128 * shape.groups + 32 and launch.grid[0] % shape.split == 0
            half = 2 if ending is Ending.SILU else 1
            assert launch.grid[1] * shape.tiles * 64 // half >= outputs
            assert launch.grid[0] // shape.split * shape.columns >= rows
            assert skinny_shape(outputs, inputs, rows, ending, "float32") is None
    assert found > 0 or rows < 9 or rows > 256


def test_what_is_compiled_ahead_covers_every_kernel_and_asks_no_old_card_for_hoppers() -> None:
    sources = {file.stem for file in nvcc.SOURCES.glob("*.cu")} - {"read_ceiling"}  # which only benchmarks launch
    for arch, others in (("sm_80", {"skinny", "wide"}), ("sm_90a", set[str]())):  # which need Hopper's instructions
        assert {one.source for one in all_kernels(arch)} == sources - others


def test_compiling_ahead_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "has no config.json" in capsys.readouterr().err
