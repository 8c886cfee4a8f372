"""A copy that does not end costs its own path, and nobody else's: other owners are met, and other paths are tried."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kvtransfer_cores import SPARE, Puller
from kvtransfer_pair import KEY, Pair, until

from engine.messages import Node
from kvtransfer.paths import Copy, CopyFailed, Export, Import

BLOCK_BYTES = 1 << 19  # the first probe takes two of the four blocks
HURRIED_S = 1.0  # for a probe; the ones that are to succeed must do so on a busy machine, too


class StuckSource:
    """Copies that end when the test says so, or the process ends."""

    num_blocks, slice_bytes, operations, gone = 1 << 20, 1 << 30, 0, False

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.copying = self.closed = False

    def copy(self, cache: Any, copies: Sequence[Copy]) -> list[int]:
        self.copying = True
        assert self.goes_on.wait(60.0)
        raise CopyFailed("after all that time")

    def abort(self) -> None:
        self.goes_on.set()

    def close(self) -> None:
        self.closed = True


class StuckEnd:
    """Either end of a path."""

    kind = "nixl"

    def __init__(self) -> None:
        self.source = StuckSource()

    def start(self) -> None:
        pass

    async def prepare(self) -> float:
        return 0.0

    async def offer(self) -> bytes:
        return b""

    def opened(self) -> None:
        pass

    def closed(self) -> None:
        pass

    async def connect(self, owner: Node, offer: bytes) -> StuckSource:
        return self.source

    async def close(self) -> None:
        pass


class StuckPair(Pair):
    def export(self, kind: str) -> Export:
        return StuckEnd()

    def import_(self, kind: str, puller: Puller) -> Import:
        return StuckEnd()

    @property
    def source(self) -> StuckSource:
        end: Any = self.imports[0]
        source: StuckSource = end.source
        return source


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.prover.PROBE_S", HURRIED_S)
    monkeypatch.setattr("kvtransfer.peers.END_S", 0.2)


async def test_an_owner_whose_probe_hangs_holds_up_no_other_and_is_reached_by_its_next_path(
    free_ports: Callable[[int], list[int]],
) -> None:
    one, two = free_ports(2)
    pair = StuckPair(one, block_bytes=BLOCK_BYTES, kinds=["nixl"])
    other = Pair(two, block_bytes=BLOCK_BYTES)
    await pair.start_server()
    await other.start_server()
    try:
        stuck = asyncio.create_task(pair.peers.reach(pair.node))
        await until(lambda: pair.source.copying)
        assert (await asyncio.wait_for(pair.peers.reach(other.node), 10.0)).bytes_per_second > 0
        route = await asyncio.wait_for(stuck, 10.0)
        assert route.transport == "grpc" and route.fallback == f"nixl: its probe took more than {HURRIED_S:g} s"
        assert not pair.source.closed and len(pair.peers._prover._free) == SPARE - 2, "it may still write into two"
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket)
        expected = pair.compute(ticket)
        await until(lambda: pull in pair.puller.ready)
        assert pair.puller.data(pull) == expected
        pair.source.goes_on.set()
        await until(lambda: pair.source.closed and len(pair.peers._prover._free) == SPARE)
    finally:
        pair.peers.abort()
        await pair.close()
        await other.close()


async def test_a_path_whose_copy_has_not_ended_is_not_tried_again(free_port: int) -> None:
    pair = StuckPair(free_port, block_bytes=BLOCK_BYTES, kinds=["nixl"])
    await pair.start_server()
    try:
        route = await pair.peers.reach(pair.node)
        route.suspect = True
        again = await asyncio.wait_for(pair.peers.reach(pair.node), 10.0)
        assert again.transport == "grpc" and again.fallback == "nixl: an earlier copy does not end"
    finally:
        pair.peers.abort()
        await pair.close()


async def test_a_process_that_ends_waits_for_no_stuck_copy(free_port: int) -> None:
    pair = StuckPair(free_port, block_bytes=BLOCK_BYTES, kinds=["nixl"])
    await pair.start_server()
    try:
        await pair.peers.reach(pair.node)
    finally:
        pair.peers.abort()
        await asyncio.wait_for(pair.close(), 10.0)
    assert pair.source.closed
