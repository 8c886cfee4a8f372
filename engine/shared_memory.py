"""Memory of this process that another one may map and read, and never write: a sealed memfd.

It has no name and ends with the last process that maps it, however that process ends. Its size is sealed, so that no
reader meets a missing page, and so is writing through any later mapping. Standard library alone.
"""

from __future__ import annotations

import fcntl
import mmap
import os

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: the mapping that exists stays writable
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """`fd` and the mapping live as long as the object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("pagewire-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self.map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS | _F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise

    def __del__(self) -> None:
        if hasattr(self, "map"):
            os.close(self.fd)
