"""One CUDA card as the engine sees it: our streams and pool in the context that torch uses, and kernel launches.

PyCUDA retains the primary context, which is torch's. Streams, which torch adopts, and launches go through the driver's
bindings: only those know priorities, and the attribute that lets a kernel start while the one before it still runs. So
does the KV pool, an allocation of its own, so that its handle can be given to other processes. Decides nothing.
"""

from __future__ import annotations

import copy
import ctypes
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backend.launches import RAISE_SHARED, Launch
from engine.backend.nvcc import DEFAULT_CACHE_DIR, Kernel, architecture, cubin


class Long(int):
    """A 64-bit integer argument; plain ints are 32-bit."""


class Address(int):
    """A pointer that is no tensor's beginning."""


Argument = Tensor | Long | Address | int | float | bytes | None


class CudaError(RuntimeError):
    """The driver refused; str() names its error."""


class _Kept:
    """What a card has from one Gpu to the next, as long as the process lives: the kernels that are loaded, and streams
    that no Gpu has any more. Each new stream would cost another 32 MiB, which torch keeps for cuBLAS by stream."""

    def __init__(self) -> None:
        self.modules: dict[Kernel, Any] = {}
        self.functions: dict[tuple[Kernel, str, int], Any] = {}
        self.limits: dict[tuple[Kernel, str], int] = {}
        self.loading = threading.Lock()  # those three
        self.streams: defaultdict[int, deque[Any]] = defaultdict(deque)  # by priority


_KEPT: defaultdict[int, _Kept] = defaultdict(_Kept)  # by the card's number


class Gpu:
    """The current card. Everything runs on `stream`, in order; one thread uses it at a time."""

    device = "cuda"

    def __init__(self, cache_dir: Path = DEFAULT_CACHE_DIR) -> None:
        import pycuda.driver as cuda
        from cuda.bindings import driver  # which torch brings along

        torch.zeros(1, device="cuda")  # makes the primary context and leaves it current
        cuda.init()
        card = cuda.Device(torch.cuda.current_device())
        self._context = card.retain_primary_context()  # as long as we live
        self._driver = driver
        self._primary = self._check(driver.cuCtxGetCurrent())
        _, self._lowest, highest = driver.cuCtxGetStreamPriorityRange()
        self._kept = _KEPT[torch.cuda.current_device()]
        self._use(highest)
        self.name = card.name()
        self.arch = architecture(*card.compute_capability())
        self.clusters = card.compute_capability()[0] >= 9  # of blocks
        self.multiprocessors = card.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)
        self.shared_per_multiprocessor = card.get_attribute(cuda.device_attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
        self.cache_dir = cache_dir
        overlapped, yielding = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        overlapped.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlapped.value.programmaticStreamSerializationAllowed = 1
        yielding.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
        yielding.value.priority = min(highest + 1, self._lowest)
        self._overlapped, self._yielding = overlapped, yielding

    def _use(self, priority: int) -> None:
        """A stream of our own, which never waits for the legacy default stream."""
        idle = self._kept.streams[priority]
        try:
            stream = idle.pop()
        except IndexError:
            flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
            stream = self._check(self._driver.cuStreamCreateWithPriority(flags, priority))
        self._priority, self._stream, self.stream = priority, stream, torch.cuda.ExternalStream(int(stream))
        weakref.finalize(self, idle.append, stream).atexit = False

    def beside(self) -> Gpu:
        """The same card by another stream, for another thread: what it launches yields to the steps on ours."""
        other = copy.copy(self)
        other._use(self._lowest)
        return other

    def twin(self) -> Gpu:
        """The same card by another stream of the same priority, for the same thread."""
        other = copy.copy(self)
        other._use(self._priority)
        return other

    # ---- memory ---------------------------------------------------------------------------------------------------

    def on_stream(self) -> Any:
        """A context manager: what torch does inside goes to our stream."""
        return torch.cuda.stream(self.stream)

    def pool(self, size: int) -> Tensor:
        """Bytes of an allocation of its own, not zeroed. It ends with the last tensor over it, in whichever thread that
        is: PyCUDA frees memory in the thread that asked for it alone. Raises CudaError."""
        self._bind()
        code, address = self._driver.cuMemAlloc(size)
        if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info()
            raise CudaError(f"{size} bytes of GPU memory are needed and {free} of {total} are free")
        memory = _Bytes(int(self._check((code, address))), size)
        weakref.finalize(memory, self._release, int(address)).atexit = False
        return torch.as_tensor(memory, device="cuda")

    def _release(self, address: int) -> None:
        """Waits for what the card still does with it."""
        self._bind()
        self._check(self._driver.cuMemFree(address))

    def pinned(self, *shape: int) -> Tensor:
        """Zeroed int32 memory of the host that kernels may read and write."""
        return torch.zeros(shape, dtype=torch.int32).pin_memory()

    def export(self, pool: Tensor) -> bytes:
        """A handle with which other processes of this host can open what `pool` returned."""
        return bytes(self._check(self._driver.cuIpcGetMemHandle(pool.data_ptr())).reserved)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory: on this card, or on one that this card reaches. Raises CudaError."""
        exported = self._driver.CUipcMemHandle()
        exported.reserved = handle
        self._bind()
        flag = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._check(self._driver.cuIpcOpenMemHandle(exported, flag.value)))

    def size(self, address: int) -> int | None:
        """Bytes of the allocation that begins there, of this process or opened; None where the driver cannot tell."""
        self._bind()
        code, _, size = self._driver.cuMemGetAddressRange(address)
        return int(size) if code == self._driver.CUresult.CUDA_SUCCESS else None

    def close(self, address: int) -> None:
        """Gives up what `open` returned. Until then the memory stays, also when its owner has ended."""
        self._bind()
        self._check(self._driver.cuIpcCloseMemHandle(address))

    def _bind(self) -> None:
        """The driver's calls need the context in the thread that makes them."""
        self._check(self._driver.cuCtxSetCurrent(self._primary))

    def free_bytes(self) -> tuple[int, int]:
        """Free and in total, of the whole card."""
        return torch.cuda.mem_get_info()

    def to_device(self, values: Any) -> Tensor:
        """Ints as an int32 tensor on the card, copied in the stream's order."""
        return torch.as_tensor(values, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)

    def to_host(self, values: Tensor) -> Tensor:
        """Whole once what was launched so far is done."""
        held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return held.copy_(values, non_blocking=True)

    # ---- order ----------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """What torch was asked for so far on its current stream comes before what we launch from here on: weights that
        change, state that is filled. By itself our stream waits for no other."""
        self.stream.wait_stream(torch.cuda.current_stream())

    def mark(self, *, sleeping: bool = False) -> torch.cuda.Event:
        """Everything launched so far; synchronize() waits for it, asleep or, which is quicker, on a busy core."""
        event = torch.cuda.Event(blocking=sleeping)
        event.record(self.stream)
        return event

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Runs `body` once, so that every kernel is loaded, and records it: what it returns replays it."""
        with self.on_stream():
            body()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            body()
        return graph.replay

    # ---- kernels --------------------------------------------------------------------------------------------------

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Those that are not in the cache yet, with all cores. Raises KernelError."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda one: cubin(one, self.arch, self.cache_dir), dict.fromkeys(kernels)))

    def launch(self, launch: Launch, *arguments: Argument, overlap: bool = True, yields: bool = False) -> None:
        """With `overlap` it may start before its predecessor has ended: all our kernels wait by themselves. One that
        `yields` starts after those of other streams that are ready, too."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *launch.grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared
        config.hStream = self._stream
        attributes = [self._yielding] if yields else []
        if overlap and self.clusters:  # older cards know no such attribute
            attributes.append(self._overlapped)
        config.attrs, config.numAttrs = attributes, len(attributes)
        name = launch.kernel, launch.function, launch.shared
        function = self._kept.functions.get(name) or self._function(launch)
        self._check(self._driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))

    def _function(self, launch: Launch) -> Any:
        driver, kernel, kept = self._driver, launch.kernel, self._kept
        with kept.loading:
            if kernel not in kept.modules:
                data = cubin(kernel, self.arch, self.cache_dir).read_bytes()
                kept.modules[kernel] = self._check(driver.cuModuleLoadData(data))
            function = self._check(driver.cuModuleGetFunction(kept.modules[kernel], launch.function.encode()))
            raised = kept.limits.get((kernel, launch.function), RAISE_SHARED)
            if launch.shared > raised:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._check(driver.cuFuncSetAttribute(function, limit, launch.shared))
                kept.limits[kernel, launch.function] = launch.shared
            kept.functions[kernel, launch.function, launch.shared] = function
        return function

    def _check(self, result: tuple[Any, ...]) -> Any:
        code, *rest = result
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"the CUDA driver answered {code.name}")
        return rest[0] if rest else None


class _Bytes:
    """Device memory as torch.as_tensor takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _value(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, Address):
        return ctypes.c_void_p(argument)
    if isinstance(argument, Long):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.create_string_buffer(argument, len(argument))
