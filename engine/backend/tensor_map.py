"""Tensor maps: how Hopper's copy engine is told where a matrix lies and which boxes of it will be asked for.

A map is 128 opaque bytes that the driver writes and a kernel takes by value. It holds the matrix's address, so it lives
no longer than the matrix. Copies nothing itself and keeps nothing alive.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

SIZE = 128
_ALIGNMENT = 64
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3
_PROMOTE_TO_128B = 2  # what the L2 fetches from memory at a time
BOX_WIDTH = 64  # elements: 128 bytes, the widest that this swizzle allows


def tensor_map(matrix: Tensor, box_rows: int) -> bytes:
    """Of a matrix [rows, K] with adjacent elements along K, for boxes of [box_rows, 64]; outside are zeros."""
    rows, width = matrix.shape
    assert matrix.stride(1) == 1 and matrix.stride(0) * matrix.element_size() % 16 == 0, "rows must be whole pieces"
    held = ctypes.create_string_buffer(SIZE + _ALIGNMENT)
    to = -(-ctypes.addressof(held) // _ALIGNMENT) * _ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(width, rows)
    strides = (ctypes.c_uint64 * 1)(matrix.stride(0) * matrix.element_size())
    box = (ctypes.c_uint32 * 2)(BOX_WIDTH, box_rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    code = _encode()(
        ctypes.c_void_p(to), ctypes.c_int(_TYPES[matrix.dtype]), ctypes.c_uint32(2), ctypes.c_void_p(matrix.data_ptr()),
        sizes, strides, box, steps, ctypes.c_int(0), ctypes.c_int(_SWIZZLE_128B), ctypes.c_int(_PROMOTE_TO_128B),
        ctypes.c_int(0),
    )  # fmt: skip
    assert code == 0, f"the driver refuses a tensor map of {tuple(matrix.shape)}: error {code}"
    return ctypes.string_at(to, SIZE)


@cache
def _encode() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
