"""Launches single kernels straight from their cubins, for benchmarks and tests of kernels: no engine, no graph of ours.

Uses the CUDA bindings that torch brings along. Of the arguments, tensors become pointers, ints and floats 32-bit values
and bytes structures. Keeps every module that it loaded for as long as the process lives.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from engine.backend.launches import RAISE_SHARED, Launch
from engine.backend.nvcc import DEFAULT_CACHE_DIR, Kernel, architecture, cubin

Argument = torch.Tensor | int | float | bytes | None


@cache
def arch() -> str:
    return architecture(*torch.cuda.get_device_capability())


def compile_all(launches: Iterable[Launch], cache_dir: Path = DEFAULT_CACHE_DIR) -> None:
    """With all cores: a test run meets many kernels."""
    kernels = {launch.kernel for launch in launches}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: cubin(one, arch(), cache_dir), kernels))


def run(launch: Launch, *arguments: Argument, overlap: bool = False) -> None:
    """On torch's current stream. With `overlap` it may start while the kernel before it still runs."""
    values = [_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *launch.grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes = launch.shared
    config.hStream = torch.cuda.current_stream().cuda_stream
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    function = _function(launch.kernel, launch.function, launch.shared)
    _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


@cache
def _module(kernel: Kernel) -> Any:
    torch.cuda.current_stream()  # torch's context is current from here on
    return _check(driver.cuModuleLoadData(cubin(kernel, arch()).read_bytes()))


@cache
def _function(kernel: Kernel, name: str, shared: int) -> Any:
    function = _check(driver.cuModuleGetFunction(_module(kernel), name.encode()))
    if shared > RAISE_SHARED:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, shared))
    return function


def _value(argument: Argument) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.create_string_buffer(argument, len(argument))


def _check(result: tuple[Any, ...]) -> Any:
    code, *rest = result
    assert code == driver.CUresult.CUDA_SUCCESS, f"the driver answered {code.name}"
    return rest[0] if rest else None
