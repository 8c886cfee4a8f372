"""`pagewire doctor`: what is wrong with this machine, the installation and the deployment, and the mend for each fault.

A check looks and changes nothing. It never imports torch: the driver, the compiler and packages are asked directly.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from pagewire.cli.failure import CommandFailed
from wire.security import Security
from wire.version import VERSION

GIB = 2**30
NEEDED_BYTES = 3 * GIB  # a prefill and a decode worker on the CPU with SmolLM2 and 1 GiB of KV each
PORTS = {
    50051: "the router",
    8000: "the router's HTTP",
    50061: "the first prefill worker",
    50071: "the first decode worker",
    8061: "that prefill worker's HTTP",
    8071: "that decode worker's HTTP",
}
INFO_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """`mend` is empty where nothing is wrong; a `fault` keeps something from working, a `note` does not."""

    check: str
    state: str  # "ok", "note" or "fault"
    says: str
    mend: str = ""


async def doctor(address: str, security: Security, cache_dir: Path | None, *, as_json: bool) -> None:
    """Prints every finding; raises CommandFailed if one is a fault."""
    deployment, answers = await _deployment(address, security)
    found = [
        *_python(),
        *_packages(),
        *_generated(),
        *_memory(),
        *_shared_memory(),
        *_gpu(),
        *_compiler(),
        *_model_cache(cache_dir or Path("~/.cache/pagewire/models").expanduser()),
        *(() if answers else _ports()),
        *deployment,
    ]
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        width = max(len(each.check) for each in found)
        for each in found:
            print(f"{each.state:<6} {each.check:<{width}}  {each.says}")
            if each.mend:
                print(f"{'':<6} {'':<{width}}  mend: {each.mend}")
    if faults := sum(each.state == "fault" for each in found):
        raise CommandFailed(f"{faults} fault{'s' if faults > 1 else ''} found")


# ---- the installation ---------------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    inside = (3, 11) <= tuple(map(int, version.split(".")[:2])) <= (3, 13)
    mend = "" if inside else "make clean, then make PYTHON=/path/to/python3.11 ..."
    says = f"{version} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok" if inside else "fault", says if inside else f"{says}; 3.11 to 3.13 work", mend)


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    mend = "pip install --constraint requirements.lock --editable ."
    if not _installed("pagewire"):
        yield Finding("packages", "note", "pagewire runs from its source tree: what it needs is not checked", mend)
        return
    wrong: list[str] = []
    wanted = [Requirement(each) for each in metadata.requires("pagewire") or () if "extra ==" not in each]
    for each in wanted:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{each.name} is not installed")
            continue
        if not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} {version} is not {each.specifier}")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("grpcio", "torch") if _installed(name))
    if wrong:
        yield Finding("packages", "fault", "; ".join(wrong), mend)
    else:
        yield Finding("packages", "ok", f"pagewire {VERSION}, {versions}")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _generated() -> Iterator[Finding]:
    """The protobuf modules are made at installation, for the runtime of that moment."""
    try:
        from wire import codec  # noqa: F401
    except (ImportError, RuntimeError, TypeError) as error:
        yield Finding("protobuf", "fault", str(error).splitlines()[0], "make protos, or install Pagewire again")
    else:
        yield Finding("protobuf", "ok", f"generated code fits protobuf {metadata.version('protobuf')}")


# ---- the machine --------------------------------------------------------------------------------------------------


def _memory() -> Iterator[Finding]:
    free, total, cores = psutil.virtual_memory().available, psutil.virtual_memory().total, len(os.sched_getaffinity(0))
    says = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, {cores} cores"
    if free >= NEEDED_BYTES:
        yield Finding("memory", "ok", says)
        return
    mend = "lower --kv-memory, or end what holds the memory"
    yield Finding("memory", "note", f"{says}; one worker of each kind takes about {NEEDED_BYTES / GIB:.0f} GiB", mend)


def _shared_memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("pagewire-doctor"))
    except (OSError, AttributeError) as error:
        yield Finding("memfd", "note", f"no shared memory: {error}", "none needed: blocks then move by grpc")
    else:
        yield Finding("memfd", "ok", "workers of this host can share memory")


def _gpu() -> Iterator[Finding]:
    cards = cuda_cards()
    if isinstance(cards, str) and os.environ.get("PAGEWIRE_DEVICE") == "cuda":  # as in the image for cards
        mend = "for a container NVIDIA's container toolkit and --gpus all; or PAGEWIRE_DEVICE=cpu"
        yield Finding("gpu", "fault", f"{cards.split(':')[0]}, and PAGEWIRE_DEVICE is cuda", mend)
        return
    if isinstance(cards, str):
        yield Finding("gpu", "ok" if cards.startswith("no ") else "fault", *cards.split("; mend: "))
        return
    from engine.backend.nvcc import ARCHITECTURES

    for number, (name, capability, memory) in enumerate(cards):
        says = f"{number}: {name}, compute capability {capability[0]}.{capability[1]}, {memory / GIB:.0f} GiB"
        if capability not in ARCHITECTURES:
            known = ", ".join(f"{a}.{b}" for a, b in ARCHITECTURES)
            yield Finding("gpu", "fault", f"{says}; supported are {known}", "run with --device cpu")
        elif "+cpu" in (torch := metadata.version("torch") if _installed("torch") else ""):
            mend = "install torch from PyPI, or run with --device cpu"
            yield Finding("gpu", "fault", f"{says}; torch {torch} is built without CUDA", mend)
        elif not find_spec("pycuda"):
            yield Finding("gpu", "fault", f"{says}; PyCUDA is not installed", "pip install 'pagewire[cuda]'")
        else:
            yield Finding("gpu", "ok", says)


def cuda_cards() -> list[tuple[str, tuple[int, int], int]] | str:
    """(name, compute capability, bytes) of each card that the driver finds; else why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: workers run on the CPU"
    if status := driver.cuInit(0):
        if status == 100:
            return "no CUDA card: workers run on the CPU"
        return f"the NVIDIA driver answers error {status}; mend: nvidia-smi, and the kernel's log, say more"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return [_card(driver, number) for number in range(count.value)]


def _card(driver: ctypes.CDLL, number: int) -> tuple[str, tuple[int, int], int]:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
    return name.value.decode(), (major.value, minor.value), memory.value


def _compiler() -> Iterator[Finding]:
    """Either compiles kernels: nvcc when it is needed, or the cache that another machine filled."""
    from engine.backend.nvcc import DEFAULT_CACHE_DIR

    cache = DEFAULT_CACHE_DIR.expanduser()
    kernels = sum(1 for _ in cache.glob("*.cubin")) if cache.is_dir() else 0
    kept = f"{kernels} compiled kernels in {cache}"
    if (nvcc := shutil.which("nvcc")) is not None:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        release = next((line.strip() for line in said.splitlines() if "release" in line), "unknown release")
        yield Finding("nvcc", "ok", f"{release}; {kept}")
    elif kernels or isinstance(cuda_cards(), str):
        yield Finding("nvcc", "ok", f"not installed; {kept}")
    else:
        mend = "install CUDA's nvcc, or copy the folder from a machine where `pagewire compile` ran"
        yield Finding("nvcc", "fault", f"not installed, and {kept}", mend)


def _model_cache(folder: Path) -> Iterator[Finding]:
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(nearest, os.W_OK):
        yield Finding("models", "fault", f"{nearest} cannot be written", "give another --cache-dir, or the right to it")
        return
    free = shutil.disk_usage(nearest).free
    kept = sum(1 for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else 0
    says = f"{kept} converted in {folder}, {free / GIB:.0f} GiB free"
    mend = "" if free >= GIB else "make room, or give another --cache-dir"
    yield Finding("models", "ok" if free >= GIB else "note", says, mend)


def _ports() -> Iterator[Finding]:
    from wire.ports import PortTaken, check_free

    for port, use in PORTS.items():
        try:
            check_free("127.0.0.1", port)
        except PortTaken as error:
            says, _, mend = str(error).partition("; ")
            yield Finding(f"port {port}", "note", f"{says} ({use} wants it)", mend or "end it, or choose another port")
    yield Finding("ports", "ok", "looked at " + ", ".join(map(str, PORTS)))


# ---- the deployment -----------------------------------------------------------------------------------------------


async def _deployment(address: str, security: Security) -> tuple[list[Finding], bool]:
    """What the router says of itself and its workers, and whether it answered."""
    from pagewire.answers import PagewireError
    from pagewire.client import AsyncClient

    try:
        async with AsyncClient(address, security) as client:
            info = await client.server_info(timeout=INFO_TIMEOUT)
    except PagewireError as error:
        return [Finding("router", "note", str(error), "pagewire up, or --address of the router that runs")], False
    found = [Finding("router", "ok", f"{address}, version {info.version}, up {info.uptime:.0f} s")]
    for role in ("prefill", "decode"):
        if not any(each.role == role and each.accepting for each in info.workers):
            mend = f"start one: pagewire {role} --model ..., at an address that the router's --{role} names"
            found.append(Finding(role, "fault", f"no {role} worker takes work", mend))
    for each in info.workers:
        says = f"{each.address}, {each.dtype}, {each.total_blocks} blocks x {each.block_size}"
        if each.accepting:
            found.append(Finding(each.role, "ok", says))
        else:
            mend = "start it with the model, --dtype and --block-size of the others"
            reason = each.reason or "takes no work"
            layout = "layout" in reason
            found.append(Finding(each.role, "fault", f"{each.address} {reason}", mend if layout else "look at its log"))
    return found, True
