"""Compiles the kernels in csrc/ with nvcc, once per (card, settings), into a cache on disk.

A cubin's name is a hash of its source, of the headers it includes, of the settings and of the architecture, so an
edit never meets a stale cubin, and a machine without nvcc can run whatever a machine with nvcc compiled. A file that
exists under its own name is whole: it is written beside its place and renamed, under a lock. Loads nothing onto a
card and imports neither torch nor PyCUDA.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parents[2] / "csrc"
DEFAULT_CACHE_DIR = Path("~/.cache/pagewire/kernels")
ARCHITECTURES = {(8, 0): "sm_80", (8, 6): "sm_80", (8, 7): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90a"}

_FLAGS = ("-cubin", "-std=c++17", "-O3", "-Xptxas=-v", "-Xptxas=-warn-spills")
_ERROR = re.compile(
    r"^(?:.*[\\/])?([^\\/\s(]+\.cuh?)\((\d+)\):\s*(?:catastrophic |fatal )?error:?\s*(.*)$", re.MULTILINE
)
_PTXAS_ERROR = re.compile(
    r"^ptxas (?:fatal|error)\s*:\s*(.*)$|^.*?: error\s*:\s*(.*)$|^nvcc fatal\s*:\s*(.*)$", re.MULTILINE
)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '\w+'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class KernelError(RuntimeError):
    """A kernel that we cannot compile or find; str() is one sentence that says what to do or what nvcc said."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A file of csrc/ without its suffix, and its settings, each of which becomes -DNAME=VALUE."""

    source: str
    settings: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return " ".join([f"{self.source}.cu", *(f"{name}={value}" for name, value in self.settings)])


@dataclass(frozen=True, slots=True)
class Usage:
    """What one function needs per thread, from ptxas. `spilled` and `stack` are bytes and should be 0."""

    function: str
    registers: int
    stack: int
    spilled: int


def kernel(source: str, **settings: int) -> Kernel:
    return Kernel(source, tuple(sorted(settings.items())))


def architecture(major: int, minor: int) -> str:
    """nvcc's name for a card's compute capability."""
    name = ARCHITECTURES.get((major, minor))
    if name is None:
        known = ", ".join(f"{a}.{b}" for a, b in ARCHITECTURES)
        raise KernelError(f"a card of compute capability {major}.{minor} is not supported; supported are {known}")
    return name


def cubin(wanted: Kernel, arch: str, cache_dir: Path = DEFAULT_CACHE_DIR, nvcc: str = "nvcc") -> Path:
    """The compiled kernel's file, compiled now if no process has done so before. Raises KernelError."""
    folder = cache_dir.expanduser()
    target = folder / f"{wanted.source}-{arch}-{_digest(wanted, arch)}.cubin"
    if target.exists():
        return target
    compiler = _compiler(nvcc)
    if compiler is None:
        raise KernelError(
            f"{wanted} is not compiled for {arch}: either install CUDA's nvcc (on the PATH, or by pip install "
            f"'cuda-toolkit[nvcc,cccl]'), or copy into {folder} what `pagewire compile` wrote there on a machine that "
            f"has nvcc"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():  # else another process made it meanwhile
            _compile(wanted, arch, target, compiler)
    return target


def usages(compiled: Path) -> list[Usage]:
    """Of every function in a file that `cubin` returned."""
    report = compiled.with_suffix(".log").read_text()
    return [
        Usage(
            function=found["name"],
            registers=int(found["registers"]),
            stack=int(found["stack"]),
            spilled=int(found["stores"]) + int(found["loads"]),
        )
        for found in _FUNCTION.finditer(report)
    ]


def check_spills(kernels: Iterable[Kernel], arch: str, cache_dir: Path = DEFAULT_CACHE_DIR, jobs: int = 1) -> int:
    """Compiles all of them; how many there are. Raises KernelError naming the first that spills registers."""
    wanted = list(kernels)
    with ThreadPoolExecutor(jobs) as pool:
        compiled = list(pool.map(lambda one: cubin(one, arch, cache_dir), wanted))
    for one, file in zip(wanted, compiled, strict=True):
        for usage in usages(file):
            if usage.spilled or usage.stack:
                raise KernelError(
                    f"{one} for {arch}: {usage.function} spills {usage.spilled} bytes of registers and keeps "
                    f"{usage.stack} bytes on its stack"
                )
    return len(wanted)


def _compiler(nvcc: str) -> str | None:
    """On the PATH, else where NVIDIA's Python packages put it."""
    if found := shutil.which(nvcc):
        return found
    packages = importlib.util.find_spec("nvidia")
    places = [Path(place, "cu13", "bin", nvcc) for place in (packages and packages.submodule_search_locations) or ()]
    return next((str(place) for place in places if place.is_file()), None)


def _digest(wanted: Kernel, arch: str) -> str:
    digest = hashlib.sha256(repr((wanted.settings, arch, _FLAGS)).encode())
    for file in _files(wanted.source):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _files(source: str) -> list[Path]:
    """The source and, in the order in which they are met, the headers of csrc/ that it includes."""
    first = SOURCES / f"{source}.cu"
    if not first.is_file():
        there = ", ".join(sorted(file.stem for file in SOURCES.glob("*.cu"))) or "nothing"
        raise KernelError(f"there is no kernel {source!r} in {SOURCES}, which has {there}")
    files = [first]
    for file in files:  # grows while it is read
        for name in _INCLUDE.findall(file.read_text()):
            header = SOURCES / name
            if header.is_file() and header not in files:
                files.append(header)
    return files


def _compile(wanted: Kernel, arch: str, target: Path, compiler: str) -> None:
    """Under the lock. The report is in place before the cubin is, so that one never lacks the other."""
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}.", dir=target.parent) as folder:
        out = Path(folder) / target.name
        virtual = arch.replace("sm_", "compute_")
        command = [compiler, *_FLAGS, f"-gencode=arch={virtual},code={arch}", f"-I{SOURCES}"]
        command += [f"-D{name}={value}" for name, value in wanted.settings]
        ran = subprocess.run(
            [*command, "-o", str(out), str(SOURCES / f"{wanted.source}.cu")],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise KernelError(f"{wanted} does not compile for {arch}: {_first_error(ran.stdout + ran.stderr)}")
        report = out.with_suffix(".log")
        report.write_text(ran.stdout + ran.stderr)
        os.replace(report, target.with_suffix(".log"))
        os.replace(out, target)


def _first_error(said: str) -> str:
    if found := _ERROR.search(said):
        return f"{found[1]}:{found[2]}: {found[3]}"
    if found := _PTXAS_ERROR.search(said):
        return next(part for part in found.groups() if part)
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[0] if lines else "the compiler said nothing"
