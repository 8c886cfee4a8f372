"""Model directories that we make ourselves, each made once however many processes start together.

A directory is written under a temporary name beside its place and renamed when it is complete, under a file lock;
so one that exists under its own name is whole, and a process that is killed leaves nothing that is taken for one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

Progress = Callable[[str, float], None]  # phase, fraction of it in [0, 1]

DEFAULT_CACHE_DIR = Path("~/.cache/pagewire/models")


def no_progress(phase: str, fraction: float) -> None:
    """For callers who do not show any."""


def make_once(target: Path, write: Callable[[Path], None], intact: Callable[[Path], bool], progress: Progress) -> Path:
    """`target`, written by `write(temporary folder)` unless it is there and `intact`."""
    if target.is_dir() and intact(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f"{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process", 0.0)
        lock.acquire()
    try:
        if not (target.is_dir() and intact(target)):  # else another process made it meanwhile
            _make(target, write)
    finally:
        lock.release()
    return target


def _make(target: Path, write: Callable[[Path], None]) -> None:
    """Under the lock: whatever is in the way, or was left by a process that was killed, is nobody's."""
    prefix = f".{target.name}."
    for left_over in [target, *target.parent.glob(f"{prefix}*")]:
        if left_over.exists():
            shutil.rmtree(left_over)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        write(folder)
        folder.chmod(0o755)  # mkdtemp's is for its owner alone
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
