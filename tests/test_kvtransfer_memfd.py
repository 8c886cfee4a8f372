"""Blocks through shared memory, over real sockets and streams: every byte arrives, and every no has its reason."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvtransfer_cores import Owner, Puller, layout

from engine.messages import Node, Reason, RequestKey, Ticket
from engine.shared_memory import SharedMemory
from kvtransfer.actions import Action
from kvtransfer.service import KvTransferService, PullClients
from kvtransfer.ticket import layout_digest
from kvtransfer.transports import memfd
from kvtransfer.transports.memfd import NoPool, Pool, Pools, PoolServer
from protos import worker_pb2_grpc
from wire.channel import open_channel, open_server
from wire.security import Security

NUM_BLOCKS = 24
BLOCK_BYTES = 1 << 16
TRANSFERS = 2_000
KEY = RequestKey(5, 1)
PLACED = RequestKey(5, 1, 1)


class Pair:
    """An owner that serves its memory, and a puller, each with its drivers."""

    def __init__(
        self, port: int, only_memory: bool = False, digests: bool = True, num_blocks: int = NUM_BLOCKS
    ) -> None:
        self.memory = SharedMemory(num_blocks * BLOCK_BYTES)
        node = Node("prefill-0", random.getrandbits(64), f"127.0.0.1:{port}")
        self.owner = Owner(num_blocks, BLOCK_BYTES, node, memory=self.memory)
        self.pool = PoolServer(node.incarnation, layout(BLOCK_BYTES), self.memory)
        self.service = KvTransferService(self.owner, self.owner.cache, self.at_owner)
        self.server = open_server(Security(), internal=True)
        worker_pb2_grpc.add_KvTransferServiceServicer_to_server(self.service, self.server)
        self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.puller = Puller(num_blocks, BLOCK_BYTES)
        self.clients = PullClients(
            self.puller, self.puller.cache, self.at_puller, connect, only_memory=only_memory, digests=digests
        )

    def at_owner(self, actions: list[Action]) -> None:
        for action in actions:
            self.service.carry(action)

    def at_puller(self, actions: list[Action]) -> None:
        for action in actions:
            self.clients.carry(action)

    def start(self, ticket: Ticket, key: RequestKey = PLACED, transport: str = "memfd") -> int:
        pull, actions = self.puller.start(ticket, key, time.monotonic(), transport)
        self.at_puller(actions)
        return pull

    def compute(self, ticket: Ticket) -> list[bytes]:
        self.at_owner(self.owner.seal(ticket.id, range(ticket.num_blocks), time.monotonic()))
        expected = [bytes(self.owner.cache.block_bytes(block)) for block in self.owner.tables[ticket.id]]
        self.at_owner(self.owner.finish(ticket.id, time.monotonic()))
        return expected

    def cancel(self, pull: int) -> None:
        self.at_puller(self.puller.cancel(pull, time.monotonic()))

    async def over(self) -> None:
        await until(lambda: len(self.service) == len(self.clients) == len(self.puller.inbox) == 0)
        self.owner.pool.audit(self.owner.holders())
        self.puller.pool.audit(self.puller.holders())

    async def close(self) -> None:
        await self.clients.close()
        await self.server.stop(None)
        await self.pool.close()
        await self.over()


def connect(address: str) -> object:
    return open_channel(address, Security(), internal=True)


async def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)


@pytest.fixture
async def pair(free_port: int) -> AsyncIterator[Pair]:
    pair = Pair(free_port)
    await pair.server.start()
    pair.pool.start()
    yield pair
    await pair.close()


async def test_every_byte_arrives_and_none_of_them_on_the_stream(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 22, 0.0)
    pull = pair.start(ticket)
    expected = pair.compute(ticket)
    await until(lambda: pull in pair.puller.ready and not pair.owner.tables)
    assert pair.puller.data(pull) == expected
    assert pair.service.bytes_sent == pair.clients.bytes_received == 0
    assert pair.clients.bytes_copied == 6 * BLOCK_BYTES
    assert len(pair.clients.pools) == len(pair.pool) == 1


async def test_a_pool_is_asked_for_once_however_many_pulls_there_are(pair: Pair) -> None:
    tickets = [pair.owner.accept(RequestKey(n, 1), 8, 0.0) for n in range(8)]
    pulls = [pair.start(ticket, RequestKey(n, 1, 1)) for n, ticket in enumerate(tickets)]
    expected = [pair.compute(ticket) for ticket in tickets]
    await until(lambda: all(pull in pair.puller.ready for pull in pulls))
    assert [pair.puller.data(pull) for pull in pulls] == expected
    assert len(pair.pool) == 1


async def test_bytes_that_changed_after_they_were_announced_fail_the_pull(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pair.owner.seal(ticket.id, [0, 1], 0.0)
    pair.owner.cache.block_bytes(pair.owner.tables[ticket.id][1])[7] ^= 1
    pull = pair.start(ticket)
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.failed[pull] is Reason.COPY_FAILED


async def test_without_digests_the_owner_is_still_asked_afterwards(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block gets a new tenant while it is copied: after the announcement, before the question."""
    pair = Pair(free_port, digests=False)
    await pair.server.start()
    pair.pool.start()
    try:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pair.owner.cache.digest = lambda *_: 0  # type: ignore[method-assign]
        pair.owner.seal(ticket.id, [0, 1], 0.0)
        lease = pair.owner.outbox._leases[ticket.id]
        copy = Pool.copy

        def copy_late(*arguments: Any) -> Any:
            lease.sealed[1] = lease.sealed[1]._replace(generation=9)
            return copy(*arguments)

        monkeypatch.setattr(Pool, "copy", copy_late)
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.failed[pull] is Reason.COPY_FAILED
    finally:
        await pair.close()


async def test_blocks_of_a_cancelled_pull_wait_for_the_copy_under_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, copy = threading.Event(), threading.Event(), Pool.copy

    def slow(*arguments: object) -> list[int]:
        begun.set()
        go.wait(5)
        return copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "copy", slow)
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket)
    pair.compute(ticket)
    await until(begun.is_set)
    pair.cancel(pull)
    await asyncio.sleep(0.1)
    assert pull not in pair.puller.drained and len(pair.puller.inbox.draining) == 2
    go.set()
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.pool.available == NUM_BLOCKS


# ---- every no has its reason --------------------------------------------------------------------------------------


async def falls_back(pair: Pair, reason: str) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket)
    expected = pair.compute(ticket)
    await until(lambda: pull in pair.puller.ready)
    assert pair.puller.data(pull) == expected
    assert pair.puller.fallbacks == {pull: reason}
    assert pair.clients.pools.refused == {reason: 1}
    assert pair.service.bytes_sent == 2 * BLOCK_BYTES
    pair.puller.end(pull)


async def test_an_owner_that_is_gone_from_this_host_sends_the_bytes(pair: Pair) -> None:
    await pair.pool.close()
    await falls_back(pair, "not offered on this host")


async def test_a_pool_of_another_user_is_not_mapped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_same_user", lambda peer: False)
    await falls_back(pair, "its owner is another user")
    await until(lambda: pair.pool.refused == {"another user": 1})


async def test_the_owner_gives_nothing_to_another_user(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter([True, False])  # the puller looks first
    monkeypatch.setattr(memfd, "_same_user", lambda peer: next(verdicts))
    await falls_back(pair, "an answer that is none")


async def test_a_pool_whose_owner_ended_is_forgotten(pair: Pair) -> None:
    await pair.clients.pools.obtain(pair.owner.node.incarnation)
    await pair.pool.close()
    await until(lambda: len(pair.clients.pools) == 0)
    await falls_back(pair, "not offered on this host")


async def test_where_only_memory_will_do_the_pull_fails(free_port: int) -> None:
    pair = Pair(free_port, only_memory=True)
    await pair.server.start()
    try:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.failed[pull] is Reason.COPY_FAILED
        assert len(pair.service) == 0
    finally:
        await pair.close()


async def said(greeting: bytes, descriptors: list[int], incarnation: int) -> str:
    """What is refused when an owner of this name says so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(memfd._address(incarnation))
        listener.listen(1)
        pools = Pools(layout(BLOCK_BYTES))

        def answer() -> None:
            with listener.accept()[0] as peer:
                socket.send_fds(peer, [greeting], descriptors)

        answering = asyncio.create_task(asyncio.to_thread(answer))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NoPool) as refusal:
            await pools.obtain(incarnation)
        await answering
        await pools.close()
        assert len(os.listdir("/proc/self/fd")) <= before, "a refused descriptor stays open"
        return str(refusal.value)


async def test_what_does_not_fit_together_is_refused_by_name() -> None:
    memory, size = SharedMemory(4 * BLOCK_BYTES), 4 * BLOCK_BYTES
    me = random.getrandbits(64)
    digest = layout_digest(layout(BLOCK_BYTES))

    def greeting(incarnation: int = me, size: int = size, layout: bytes = digest) -> bytes:
        return memfd._GREETING.pack(b"pagewire", incarnation, size, layout)

    assert await said(greeting(me ^ 1), [memory.fd], me) == "another incarnation"
    assert await said(greeting(layout=b"x" * 32), [memory.fd], me) == "another layout"
    assert await said(greeting(size=2 * BLOCK_BYTES), [memory.fd], me) == "a descriptor of another size"
    assert await said(greeting()[:-1], [memory.fd], me) == "an answer that is none"
    assert await said(greeting() + b"x", [memory.fd], me) == "an answer that is none"
    assert await said(greeting(), [], me) == "an answer that is none"
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, size)
    assert await said(greeting(), [loose], me) == "a descriptor without seals"
    os.close(loose)


async def test_a_block_that_the_owner_s_memory_has_not_fails_the_pull(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await pair.clients.pools.obtain(pair.owner.node.incarnation)
    pool.num_blocks = 0
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket)
    pair.compute(ticket)
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.failed[pull] is Reason.COPY_FAILED


def mappings() -> int:
    return Path("/proc/self/maps").read_text("utf-8").count("memfd:pagewire")


@pytest.mark.parametrize("transport", ["memfd", "grpc"])
async def test_thousands_of_transfers_with_cancellations_leave_nothing_behind(transport: str, free_port: int) -> None:
    rng = random.Random(3)
    pair = Pair(free_port, num_blocks=512)
    await pair.server.start()
    pair.pool.start()
    numbers = iter(range(TRANSFERS))
    right = cancelled = 0

    async def one(number: int) -> None:
        nonlocal right, cancelled
        ticket = pair.owner.accept(RequestKey(number, 1), rng.randint(1, 8), 0.0)
        pull = pair.start(ticket, RequestKey(number, 1, 1), transport)
        leaves = rng.random() < 0.3
        if leaves and rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.01)
        expected = pair.compute(ticket) if ticket.id in pair.owner.tables else []
        if leaves:
            await asyncio.sleep(rng.random() * 0.02)
            if pull not in pair.puller.ready:
                pair.cancel(pull)
        await until(lambda: pull in pair.puller.ready or pull in pair.puller.drained)
        if pull in pair.puller.ready:
            assert pair.puller.data(pull) == expected
            pair.puller.end(pull)
            right += 1
        else:
            cancelled += 1
        if ticket.id in pair.owner.tables and not pair.puller.ready.get(pull):
            pair.at_owner(pair.owner.revoke(ticket.id, time.monotonic()))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    await one(next(numbers))
    before, mapped = psutil.Process().num_fds(), mappings()
    await asyncio.gather(*(worker() for _ in range(48)))
    await until(lambda: not pair.owner.tables)
    await pair.over()
    assert psutil.Process().num_fds() <= before and mappings() <= mapped
    assert pair.owner.pool.available == pair.puller.pool.available == 512
    assert not pair.puller.failed and right > 0.7 * TRANSFERS and cancelled > 0.05 * TRANSFERS
    await pair.close()
    assert right + cancelled == TRANSFERS


def test_whoever_gets_the_descriptor_can_neither_write_nor_resize() -> None:
    memory = SharedMemory(BLOCK_BYTES)
    memory.map[:5] = b"ours!"
    with mmap.mmap(memory.fd, BLOCK_BYTES, prot=mmap.PROT_READ) as reader:
        assert reader[:5] == b"ours!"
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, BLOCK_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"theirs", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 1)
