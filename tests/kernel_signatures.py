"""What the kernels of csrc/ take, read from their sources, and whether a launch gives them that.

Without a card nothing else notices an argument too many, an int in a pointer's place, or a tensor of another type: the
driver takes addresses of values and asks for no types. Knows no values and runs nothing.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Address, Long
from engine.backend.launches import Launch
from engine.backend.nvcc import SOURCES
from engine.backend.tensor_map import SIZE
from engine.config import DTYPES

SIZES = {
    "Ahead": launches.AHEAD.size,
    "RopeArgs": launches.ROPE_ARGS.size,
    "State": launches.ROW_STATE.size,
    "TensorMap": SIZE,
}
STRUCTURES = {
    ("attention_plan.cuh", "Ahead"): launches.AHEAD,
    ("rope.cuh", "RopeArgs"): launches.ROPE_ARGS,
    ("advance.cu", "State"): launches.ROW_STATE,
    ("sample.cu", "Row"): launches.SAMPLE_ROW,
}
_FORMATS = {"int": "i", "float": "f", "unsigned long long": "Q"}
_KERNEL = re.compile(
    r'extern "C" __global__ void\b(?P<before>[^;{]*?)\b(?P<name>[a-z]\w*)\((?P<parameters>[^{;]*)\)\s*\{'
)


def parameters(source: str, function: str, settings: dict[str, int]) -> list[str]:
    """The types of a kernel's parameters, without names and qualifiers: `elem*`, `int`, `RopeArgs`."""
    return list(_parameters(_text(source, settings), function))


@cache
def _parameters(text: str, function: str) -> tuple[str, ...]:
    for found in _KERNEL.finditer(text):
        if found["name"] == function:
            return tuple(_type_of(one) for one in found["parameters"].split(","))
    raise AssertionError(f"there is no kernel {function}")


def functions(source: str) -> list[str]:
    return [found["name"] for found in _KERNEL.finditer(_text(source, {}))]


def _text(source: str, settings: dict[str, int]) -> str:
    """Without comments, and of conditions upon EPILOGUE and DTYPE only what holds."""
    name = "paged_attention_float.cuh" if source == "paged_attention" and settings.get("DTYPE") == 0 else f"{source}.cu"
    text = re.sub(r"//[^\n]*", "", (SOURCES / name).read_text())
    rotates = settings.get("EPILOGUE") == 3

    def chosen(found: re.Match[str]) -> str:
        return found[1] if rotates else found[2]

    return re.sub(r"#if EPILOGUE == ROPE\n(\s*,\s*RopeArgs rope\) \{)\n#else\n(\s*\) \{)", chosen, text)


def _type_of(parameter: str) -> str:
    words = parameter.replace("__restrict__", "").replace("__grid_constant__", "").replace("*", " * ").split()
    words = [word for word in words if word != "const"][:-1]  # the last is its name
    return " ".join(words).replace(" *", "*")


def fields(file: str, structure: str) -> str:
    """A structure's members as the struct module writes them, one letter each."""
    text = re.sub(r"//[^\n]*", "", (SOURCES / file).read_text())
    found = re.search(rf"struct {structure} \{{(.*?)\}};", text, re.DOTALL)
    assert found is not None, f"{file} has no {structure}"
    letters = ""
    for member in found[1].split(";"):
        if not member.strip():
            continue
        if "*" in member:
            letters += "Q"
            continue
        kind, names = re.match(r"\s*(unsigned long long|\w+)\s+(.*)", member, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            sized = re.search(r"\[(\d+)\]", name)
            letters += _FORMATS[kind] * int(sized[1] if sized else 1)
    return letters


def letters(layout: struct.Struct) -> str:
    """12x is three ints that nobody uses."""
    found = ""
    for count, letter in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        found += "i" * (int(count) // 4) if letter == "x" else letter * int(count or 1)
    return found


def check(launch: Launch, arguments: tuple[Any, ...]) -> None:
    """Raises AssertionError that names the first argument which the kernel would misread."""
    kernel, settings = launch.kernel, dict(launch.kernel.settings)
    wanted = parameters(kernel.source, launch.function, settings)
    assert len(wanted) == len(arguments), f"{launch.function} takes {len(wanted)} arguments, not {len(arguments)}"
    for place, (kind, argument) in enumerate(zip(wanted, arguments, strict=True)):
        where = f"argument {place} of {launch.function}, a {kind}, is {type(argument).__name__}"
        if kind.endswith("*"):
            assert argument is None or isinstance(argument, Tensor | Address), where
            if isinstance(argument, Tensor):
                _check_elements(kind, argument, settings, where)
        elif kind in ("int64_t", "long long"):
            assert isinstance(argument, Long), where
        elif kind == "int":
            assert isinstance(argument, int) and not isinstance(argument, Long | Address), where
            assert -(1 << 31) <= argument < 1 << 31, f"{where} of {argument}"
        elif kind == "float":
            assert isinstance(argument, float), where
        else:
            assert isinstance(argument, bytes) and len(argument) == SIZES[kind], where


def _check_elements(kind: str, tensor: Tensor, settings: dict[str, int], where: str) -> None:
    assert kind != "elem*" or tensor.dtype == getattr(torch, DTYPES[settings["DTYPE"]]), f"{where} of {tensor.dtype}"
    assert kind != "int*" or tensor.dtype == torch.int32, f"{where} of {tensor.dtype}"
