"""What threads of one card share, with a driver that is not there."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backend import cuda
from engine.backend.launches import Launch
from engine.backend.nvcc import kernel


class SlowDriver:
    """Lends a function more shared memory, and takes its time."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self) -> None:
        self.modules = 0
        self.room: dict[tuple[int, bytes], int] = {}
        self.raising = threading.Event()

    def cuModuleLoadData(self, data: bytes) -> tuple[int, int]:
        self.modules += 1
        return 0, self.modules

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, tuple[int, bytes]]:
        return 0, (module, name)

    def cuFuncSetAttribute(self, function: tuple[int, bytes], attribute: int, value: int) -> tuple[int]:
        self.raising.set()
        time.sleep(0.05)
        self.room[function] = value
        return (0,)


def test_a_kernel_that_two_threads_launch_first_has_the_room_of_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cubin").touch()
    monkeypatch.setattr(cuda, "cubin", lambda *_: tmp_path / "cubin")
    gpu: Any = object.__new__(cuda.Gpu)
    driver = SlowDriver()
    gpu._driver, gpu.arch, gpu.cache_dir, gpu._kept = driver, "sm_90a", tmp_path, cuda._Kept()
    more, less = (Launch(kernel("skinny"), "skinny", (1, 1), 128, shared) for shared in (200 << 10, 100 << 10))
    with ThreadPoolExecutor(1) as other:
        large = other.submit(gpu._function, more)
        assert driver.raising.wait(5.0)
        found = gpu._function(less)
        assert driver.room[found] >= less.shared, "it would be refused"
    assert large.result() == found and driver.modules == 1 and driver.room[found] == more.shared


class Memory:
    """Of 100 bytes; frees only in a thread whose context is set."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"), CUDA_ERROR_OUT_OF_MEMORY="too much")

    def __init__(self) -> None:
        self.current = threading.local()
        self.held: set[int] = set()

    def cuCtxSetCurrent(self, context: str) -> tuple[Any]:
        self.current.context = context
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemAlloc(self, size: int) -> tuple[Any, int]:
        if size > 100:
            return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.held.add(4096)
        return self.CUresult.CUDA_SUCCESS, 4096

    def cuMemFree(self, address: int) -> tuple[Any]:
        assert self.current.context == "the card's"
        self.held.remove(address)
        return (self.CUresult.CUDA_SUCCESS,)


def test_a_pool_is_freed_when_its_last_tensor_goes_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.torch, "as_tensor", lambda memory, device: [memory])  # like a tensor, keeps it
    monkeypatch.setattr(cuda.torch.cuda, "mem_get_info", lambda: (60, 100))
    gpu: Any = object.__new__(cuda.Gpu)
    gpu._driver, gpu._primary = driver, _ = Memory(), "the card's"
    made = [gpu.pool(100)]
    assert driver.held == {4096}
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    assert not driver.held
    with pytest.raises(cuda.CudaError, match=r"^101 bytes of GPU memory are needed and 60 of 100 are free$"):
        gpu.pool(101)


def test_the_stream_of_a_gpu_that_is_gone_serves_the_next_of_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def create(flags: int, priority: int) -> tuple[Any, int]:
        made.append(priority)
        return SlowDriver.CUresult.CUDA_SUCCESS, len(made)

    monkeypatch.setattr(cuda.torch.cuda, "ExternalStream", lambda handle: handle)
    flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    driver = SimpleNamespace(CUresult=SlowDriver.CUresult, CUstream_flags=flags, cuStreamCreateWithPriority=create)
    kept = cuda._Kept()

    def gpu() -> Any:
        one: Any = object.__new__(cuda.Gpu)
        one._driver, one._kept, one._lowest = driver, kept, 0
        one._use(-5)
        return one

    first, other = gpu(), gpu()
    beside = first.beside()
    assert (first.stream, other.stream, beside.stream) == (1, 2, 3) and made == [-5, -5, 0]
    del first
    assert (again := gpu()).stream == 1 and again.twin().stream == 4 and other.beside().stream == 5
    del beside
    assert {other.beside().stream, again.beside().stream} <= {3, 5} and len(made) == 5
