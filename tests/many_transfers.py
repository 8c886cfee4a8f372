"""Thousands of transfers with random cancellations over one path, and a look at what they leave behind.

`make soak` does ten thousand by each path, and prints a line for each; the tests do a few hundred. What is counted:
blocks of the pools, file descriptors, segments of shared memory that are mapped, and NIXL's transfers that were not let
go. Tickets, pulls and streams have to be over, or nothing is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from kvtransfer_cores import Owner, Puller
from kvtransfer_pair import Pair, until

from engine.blocks import BlockPool
from engine.messages import RequestKey
from kvtransfer.actions import Action
from kvtransfer.transports.local import LocalPair
from wire import logs

PATHS = ("local", "memfd", "nixl", "grpc")
SHARED = ("memfd:", "/dev/shm/", "/SYSV")  # what maps of shared memory are called
NUM_BLOCKS = 512
BLOCK_BYTES = 1 << 14
AT_ONCE = 48


class Left(NamedTuple):
    """What is there after the last transfer and was not there before the second."""

    right: int  # transfers whose every byte was right
    cancelled: int
    blocks: int
    descriptors: int
    segments: int
    handles: int = 0  # of NIXL's transfers

    @property
    def nothing(self) -> bool:
        return max(self.blocks, self.descriptors, self.segments, self.handles) <= 0


def segments() -> int:
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return sum(any(name in line for name in SHARED) for line in lines)


def in_one_process(count: int, seed: int = 3) -> Left:
    """By `local`: what a third of them leaves at is a puller that goes or an owner that takes its ticket back."""
    rng, before, mapped = random.Random(seed), psutil.Process().num_fds(), segments()
    pool = BlockPool(NUM_BLOCKS)
    owner, puller = Owner(pool=pool), Puller(pool=pool)
    pair = LocalPair(owner, puller)
    right = 0

    def carry(actions: list[Action]) -> None:
        assert pair.carry(actions, 0.0) == [], "all of it is local"

    def one(number: int) -> Iterator[None]:
        nonlocal right
        ticket = owner.accept(RequestKey(number, 1), rng.randint(1, 32), 0.0)
        blocks = owner.tables[ticket.id]
        pull, actions = puller.start(ticket, RequestKey(number, 1, 1), 0.0, "local")
        carry(actions)
        steps: list[Callable[[], list[Action]]] = [
            lambda position=position: owner.seal(ticket.id, [position], 0.0)  # type: ignore[misc]
            for position in range(ticket.num_blocks)
        ]
        steps.append(lambda: owner.finish(ticket.id, 0.0))
        if rng.random() < 0.3:
            leaves = rng.choice([lambda: puller.cancel(pull, 0.0), lambda: owner.revoke(ticket.id, 0.0)])
            steps[rng.randrange(len(steps)) :] = [leaves]
        for step in steps:
            yield
            carry(step())
        yield
        if pull in puller.ready:
            assert list(puller.bound[pull].values()) == blocks, f"transfer {number} has other blocks"
            puller.end(pull)
            right += 1
        if ticket.id in owner.tables:
            carry(owner.revoke(ticket.id, 0.0))

    waiting, under_way = iter(range(count)), list[Iterator[None]]()
    number = next(waiting, None)
    while number is not None or under_way:
        if number is not None and len(under_way) < AT_ONCE and pool.available >= 8:
            under_way.append(one(number))
            number = next(waiting, None)
        transfer = rng.choice(under_way)
        if next(transfer, under_way) is under_way:
            under_way.remove(transfer)
    pool.audit(owner.holders() + puller.holders())
    assert len(owner.outbox) == len(puller.inbox) == 0
    descriptors = psutil.Process().num_fds() - before
    return Left(right, count - right, NUM_BLOCKS - pool.available, descriptors, segments() - mapped)


class Handles:
    """How many of NIXL's transfers were made and not let go."""

    def __init__(self, api: Any) -> None:
        self.held = 0
        self._make, self._release = api.make_prepped_xfer, api.release_xfer_handle
        api.make_prepped_xfer, api.release_xfer_handle = self._made, self._released

    def _made(self, *arguments: Any) -> Any:
        self.held += 1
        return self._make(*arguments)

    def _released(self, *arguments: Any) -> None:
        self.held -= 1
        self._release(*arguments)


async def transfer(count: int, kind: str, port: int, seed: int = 3) -> Left:
    rng = random.Random(seed)
    pair = Pair(port, NUM_BLOCKS, BLOCK_BYTES, kinds=[] if kind == "grpc" else [kind])
    await pair.start_server()
    numbers = iter(range(count))
    right = cancelled = 0

    async def one(number: int) -> None:
        nonlocal right, cancelled
        ticket = pair.owner.accept(RequestKey(number, 1), rng.randint(1, 8), 0.0)
        pull = pair.start(ticket, RequestKey(number, 1, 1))
        leaves = rng.random() < 0.3
        if leaves and rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.01)
        expected = pair.compute(ticket) if ticket.id in pair.owner.tables else []
        if leaves:
            await asyncio.sleep(rng.random() * 0.02)
            if pull not in pair.puller.ready:
                pair.cancel(pull)
        await until(lambda: pull in pair.puller.ready or pull in pair.puller.drained, 60.0)
        if pull in pair.puller.ready:
            assert pair.puller.data(pull) == expected, f"transfer {number} has other bytes"
            pair.puller.end(pull)
            right += 1
        else:
            cancelled += 1
        if ticket.id in pair.owner.tables and not pair.puller.ready.get(pull):
            pair.revoke(ticket)

    async def worker() -> None:
        for number in numbers:
            await one(number)

    await one(next(numbers))
    assert pair.route == kind, pair.peers.paths()
    importer: Any = pair.imports[0] if kind == "nixl" else None
    handles = None if importer is None else Handles(importer._agent.agent.nixl)
    before, mapped = psutil.Process().num_fds(), segments()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await until(lambda: not pair.owner.tables)
    await pair.over()
    blocks = 2 * NUM_BLOCKS - pair.owner.pool.available - pair.puller.pool.available
    held = 0 if handles is None else handles.held
    left = Left(right, cancelled, blocks, psutil.Process().num_fds() - before, segments() - mapped, held)
    assert not pair.puller.failed, pair.puller.failed
    await pair.close()
    return left


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by(kind: str, count: int) -> Left:
    logs.configure("soak", "warning")
    return in_one_process(count) if kind == "local" else asyncio.run(transfer(count, kind, _free_port()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Many transfers with cancellations.")
    parser.add_argument("--path", action="append", choices=PATHS)
    parser.add_argument("--count", type=int, default=10_000)
    given = parser.parse_args()
    leaks = False
    for kind in given.path or PATHS:
        began = time.monotonic()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:  # nothing of the path before
            left = alone.submit(by, kind, given.count).result()
        leaks |= not left.nothing
        print(
            f"{kind:<6} {given.count} transfers in {time.monotonic() - began:.0f} s: {left.right} right, "
            f"{left.cancelled} cancelled; left behind: {left.blocks} blocks, {left.handles} descriptors, "
            f"{left.segments} segments, {left.descriptors} file descriptors",
            flush=True,
        )
    sys.exit(leaks)


if __name__ == "__main__":
    main()
