"""The weight files of a directory, found and checked without reading the weights; and the digest of a model.

Two workers that give the same digest have the same configuration and, but for malice, the same weights: reading
every byte of a large model would take minutes, so the digest covers each file's name, size, header, and first and
last MiB.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import ModelError

RANDOM_MARKER = "random_weights.json"  # a directory with this file has no weights: they are generated
_INDEX = "model.safetensors.index.json"
_EDGE = 1 << 20
_MAX_HEADER = 100 << 20  # as in the safetensors format


class Header(NamedTuple):
    """`size` is that of the whole file; `tensors` is its JSON header without the metadata."""

    size: int
    raw: bytes
    tensors: dict[str, Any]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in order. ModelError when there are none, or one of them is missing."""
    if (index := folder / _INDEX).is_file():
        return _indexed(folder, index)
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    # consolidated.safetensors holds the same weights again, under other names.
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} has its weights as a pickle ({pickles[0]}), which can run code when it is read; "
            "convert it to safetensors"
        )
    raise ModelError(f"{folder} has a config.json but no *.safetensors")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelError(f"{index} names a file outside its folder: {outside[0]!r}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}")
    return [folder / name for name in names]


def read_header(file: Path) -> Header:
    """ModelError when `file` is no safetensors file, or is shorter or longer than its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ModelError(f"{file} is not a complete safetensors file: {size} bytes, header of {length}")
        raw = stream.read(length)
    try:
        tensors = json.loads(raw)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{file} is not a safetensors file: its header cannot be read") from None
    if end != size:
        verb = "truncated" if size < end else "too long"
        raise ModelError(f"{file} is {verb}: it has {size} bytes and its header describes {end}")
    return Header(size, raw, tensors)


def model_digest(folder: Path) -> bytes:
    """SHA-256, 32 bytes. Checks every weight file on the way: ModelError."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if (marker := folder / RANDOM_MARKER).is_file():
        digest.update(marker.read_bytes())
        return digest.digest()
    for file in weight_files(folder):
        header = read_header(file)
        digest.update(f"\n{file.name} {header.size}\n".encode())
        digest.update(header.raw)
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, header.size - _EDGE), os.SEEK_SET)
            digest.update(stream.read(_EDGE))
    return digest.digest()
