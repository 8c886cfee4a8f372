"""Small real transfers that prove a path and measure it, one path at a time, into this process's own probe blocks.

Owns those blocks (kvtransfer.probe says where they are). A probe goes through the same states, streams, copies, digests
and questions as any pull. One whose copy does not end keeps its blocks until it has, and the next path is tried with
the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from engine.messages import Node
from kvtransfer.actions import Action
from kvtransfer.channels import Channels
from kvtransfer.paths import GB, Cache, NoPath, Route
from kvtransfer.probe import MOST_BLOCKS, ProbePuller
from kvtransfer.pulls import PullClients

PROBE_S = 3.0  # for one probe, and for its end
FIRST_BYTES = 1 << 20  # of the first probe of a path, which also warms it
MEASURE_S = 0.03  # how long each of the others should take


class Prover:
    """`floor` is in bytes per second: a path below it is none. `spare` are the blocks of `cache` for its probes."""

    def __init__(self, cache: Cache, spare: Sequence[int], channels: Channels, floor: float = 0.0) -> None:
        self._cache = cache
        self._channels = channels
        self._floor = floor
        self._free = list(spare)
        self._turn = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()  # probes that are over, and their blocks not yet free

    async def prove(self, owner: Node, route: Route, offered: int) -> None:
        """Sets the route's bytes per second. `offered`: how many probe blocks its owner has. Raises NoPath."""
        async with self._turn:
            await self._measure(owner, route, offered)
        if route.bytes_per_second < self._floor:
            rate, floor = route.bytes_per_second / GB, self._floor / GB
            raise NoPath(f"{rate:.2f} GB/s, and --min-transfer-gbps asks for {floor:g}")

    async def close(self) -> None:
        """After the last pair was met."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def _measure(self, owner: Node, route: Route, offered: int) -> None:
        """Three transfers: the first proves, the second touches all that the third is then measured on, if it was not
        the better one. A stream without probe blocks is taken on trust."""
        if offered > MOST_BLOCKS:
            raise NoPath(f"its owner names {offered} blocks for a probe, and {MOST_BLOCKS} are the most")
        size, most = self._cache.layout.block_bytes, min(offered, len(self._free))
        if most < 1:
            if route.source is None and not self._floor:
                return
            raise NoPath("there are no blocks to prove it with")
        first = max(1, min(most, FIRST_BYTES // size))
        seconds = await self._transfer(owner, route, offered, first)
        count = max(first, min(most, int(MEASURE_S / seconds * first)))
        seconds = min([await self._transfer(owner, route, offered, count) for _ in range(2)])
        route.bytes_per_second = count * size / seconds

    async def _transfer(self, owner: Node, route: Route, offered: int, count: int) -> float:
        blocks, self._free = self._free[:count], self._free[count:]
        probe = ProbePuller(self._cache.layout, blocks)

        def apply(actions: list[Action]) -> None:
            for action in actions:
                clients.carry(action)  # type: ignore[arg-type]  # a probe's actions are all for its stream

        trial = Route(route.transport, route.source, thread=route.thread)
        clients = PullClients(probe, self._cache, apply, _Given(trial), self._channels)
        apply(probe.start(owner, offered, count, route.transport, time.monotonic()))
        try:
            give_up = time.monotonic() + PROBE_S
            while not probe.over:
                await asyncio.sleep(0.001)
                apply(probe.tick(time.monotonic()))
                if time.monotonic() > give_up:
                    raise NoPath(f"its probe took more than {PROBE_S:g} s")
        finally:
            ending = asyncio.create_task(self._end(clients, blocks))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.wait([ending], timeout=PROBE_S)
        if probe.seconds is None:
            why = probe.failed.name.lower() if probe.failed else "the stream ended early"
            raise NoPath(f"its probe failed: {next(iter(trial.failures), why)}")
        return probe.seconds

    async def _end(self, clients: PullClients, blocks: Sequence[int]) -> None:
        """Returns when no copy of this probe can write any more."""
        await clients.close()
        self._free += blocks


class _Given:
    """The path under trial is the only one."""

    def __init__(self, route: Route) -> None:
        self._route = route

    async def reach(self, owner: Node) -> Route:
        return self._route
