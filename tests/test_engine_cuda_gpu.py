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
    gpu._driver, gpu.arch, gpu.cache_dir, gpu._loading = driver, "sm_90a", tmp_path, threading.Lock()
    gpu._modules, gpu._functions, gpu._limits = {}, {}, {}
    more, less = (Launch(kernel("skinny"), "skinny", (1, 1), 128, shared) for shared in (200 << 10, 100 << 10))
    with ThreadPoolExecutor(1) as other:
        large = other.submit(gpu._function, more)
        assert driver.raising.wait(5.0)
        found = gpu._function(less)
        assert driver.room[found] >= less.shared, "it would be refused"
    assert large.result() == found and driver.modules == 1 and driver.room[found] == more.shared
