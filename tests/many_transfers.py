"""Thousands of transfers with random cancellations over one path, and a look at what they leave behind.

`python tests/many_transfers.py --path memfd --count 10000` prints one line per path; the tests run a few hundred of
each. What is counted: blocks of both pools, tickets, pulls, file descriptors, and mappings of shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from kvtransfer_pair import Pair, until

from engine.messages import RequestKey

NUM_BLOCKS = 512
BLOCK_BYTES = 1 << 14
AT_ONCE = 48


class Left(NamedTuple):
    """What is there after the last transfer and was not there before the second."""

    right: int  # transfers whose every byte was right
    cancelled: int
    blocks: int
    descriptors: int
    mappings: int


def mappings() -> int:
    return Path("/proc/self/maps").read_text("utf-8").count("memfd:pagewire")


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
    before, mapped = psutil.Process().num_fds(), mappings()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await until(lambda: not pair.owner.tables)
    await pair.over()
    blocks = 2 * NUM_BLOCKS - pair.owner.pool.available - pair.puller.pool.available
    left = Left(right, cancelled, blocks, psutil.Process().num_fds() - before, mappings() - mapped)
    assert not pair.puller.failed, pair.puller.failed
    await pair.close()
    return left


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Many transfers with cancellations.")
    parser.add_argument("--path", action="append", choices=("memfd", "nixl", "grpc"))
    parser.add_argument("--count", type=int, default=10_000)
    given = parser.parse_args()
    for kind in given.path or ("memfd", "nixl", "grpc"):
        began = time.monotonic()
        left = asyncio.run(transfer(given.count, kind, _free_port()))
        print(
            f"{kind:<6} {given.count} transfers in {time.monotonic() - began:.0f} s: {left.right} right, "
            f"{left.cancelled} cancelled; left behind: {left.blocks} blocks, {left.descriptors} descriptors, "
            f"{left.mappings} mappings",
            flush=True,
        )


if __name__ == "__main__":
    main()
