"""When the garbage collector may stop a process that has steps or streams to keep going: hardly ever."""

from __future__ import annotations

import gc


def spare_collections() -> None:
    """What lives as long as the process is never looked at again: a full collection stops every stream, 40 ms in the
    router. What requests hold while they run is looked at less often: with 128 of them a look takes 2 ms, more than a
    decode step of a small model, and finds nothing. What is over is freed without the collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
