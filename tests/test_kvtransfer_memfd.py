"""Blocks through shared memory, over real sockets and streams: every byte arrives, and every no has its reason."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import random
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kvtransfer_cores import layout
from kvtransfer_pair import KEY, Pair, until

from engine.messages import Node, Reason, RequestKey
from engine.shared_memory import SharedMemory
from kvtransfer.paths import Copy, CopyFailed, NoPath
from kvtransfer.ticket import layout_digest
from kvtransfer.transports import memfd, same_host
from kvtransfer.transports.memfd import MemfdExport, MemfdImport, MemfdSource

NUM_BLOCKS = 24
BLOCK_BYTES = 1 << 16


@pytest.fixture
async def pair(free_port: int) -> AsyncIterator[Pair]:
    pair = Pair(free_port, NUM_BLOCKS, BLOCK_BYTES, kinds=["memfd"])
    await pair.start_server()
    yield pair
    await pair.close()


def served(pair: Pair) -> MemfdExport:
    export = pair.exports[0]
    assert isinstance(export, MemfdExport)
    return export


async def test_every_byte_arrives_and_none_of_them_on_the_stream(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 22, 0.0)
    pull = pair.start(ticket)
    expected = pair.compute(ticket)
    await until(lambda: pull in pair.puller.ready and not pair.owner.tables)
    assert pair.puller.data(pull) == expected
    assert pair.service.bytes_sent == pair.clients.bytes_received == 0
    assert pair.clients.bytes_copied == 6 * BLOCK_BYTES
    assert pair.route == "memfd" and len(served(pair)) == 1


async def test_a_pool_is_asked_for_once_however_many_pulls_there_are(pair: Pair) -> None:
    tickets = [pair.owner.accept(RequestKey(n, 1), 8, 0.0) for n in range(8)]
    pulls = [pair.start(ticket, RequestKey(n, 1, 1)) for n, ticket in enumerate(tickets)]
    expected = [pair.compute(ticket) for ticket in tickets]
    await until(lambda: all(pull in pair.puller.ready for pull in pulls))
    assert [pair.puller.data(pull) for pull in pulls] == expected
    assert len(served(pair)) == pair.peers.paired == pair.service.paired == 1


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
    pair = Pair(free_port, NUM_BLOCKS, BLOCK_BYTES, kinds=["memfd"], digests=False)
    await pair.start_server()
    await pair.peers.reach(pair.node)
    try:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pair.owner.cache.digest = lambda *_: 0  # type: ignore[method-assign]
        pair.owner.seal(ticket.id, [0, 1], 0.0)
        lease = pair.owner.outbox._leases[ticket.id]
        copy = MemfdSource.copy

        def copy_late(*arguments: Any) -> Any:
            lease.sealed[1] = lease.sealed[1]._replace(generation=9)
            return copy(*arguments)

        monkeypatch.setattr(MemfdSource, "copy", copy_late)
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.failed[pull] is Reason.COPY_FAILED
    finally:
        await pair.close()


async def test_blocks_of_a_cancelled_pull_wait_for_the_copy_under_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.peers.reach(pair.node)
    begun, go, copy = threading.Event(), threading.Event(), MemfdSource.copy

    def slow(*arguments: object) -> list[int]:
        begun.set()
        go.wait(30)
        return copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemfdSource, "copy", slow)
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


async def test_blocks_of_a_copy_that_broke_wait_for_the_slice_behind_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slices are under way at a time. The second one's bytes must not land in somebody else's blocks."""
    route = await pair.peers.reach(pair.node)
    assert route.source is not None
    monkeypatch.setattr(route.source, "slice_bytes", BLOCK_BYTES)
    fail, begun, go, copy, calls = threading.Event(), threading.Event(), threading.Event(), MemfdSource.copy, [0]

    def broken(*arguments: object) -> list[int]:
        calls[0] += 1
        if calls[0] == 1:
            fail.wait(30)
            raise ZeroDivisionError("nobody foresaw this")
        begun.set()
        go.wait(30)
        return copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemfdSource, "copy", broken)
    ticket = pair.owner.accept(KEY, 22, 0.0)
    pull = pair.start(ticket)
    pair.compute(ticket)
    fail.set()
    await until(begun.is_set)
    pair.cancel(pull)
    await asyncio.sleep(0.1)
    assert pull not in pair.puller.drained and len(pair.puller.inbox.draining) == 6
    go.set()
    await until(lambda: pull in pair.puller.drained)
    assert calls[0] == 2, "no copy begins once the pull is over"
    pair.revoke(ticket)


# ---- every no has its reason --------------------------------------------------------------------------------------


async def falls_back(pair: Pair, reason: str) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket)
    expected = pair.compute(ticket)
    await until(lambda: pull in pair.puller.ready)
    assert pair.puller.data(pull) == expected
    assert pair.puller.paths == {pull: f"grpc (memfd: {reason})"}
    assert pair.imports[0].refused == {reason: 1}
    assert pair.peers.paths()[0].fallback == f"memfd: {reason}"
    rate = pair.peers.paths()[0].bytes_per_second / 1e9
    assert f"by grpc, {rate:.2f} GB/s" in pair.said[-1] and reason in pair.said[-1]
    pair.puller.end(pull)


async def test_an_owner_that_is_gone_from_this_host_sends_the_bytes(pair: Pair) -> None:
    await served(pair).close()
    await falls_back(pair, "not offered on this host")


async def test_a_pool_of_another_user_is_not_mapped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host, "same_user", lambda peer: False)
    await falls_back(pair, "its owner is another user")
    await until(lambda: served(pair).refused == {"another user": 1})


async def test_the_owner_gives_nothing_to_another_user(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter([True, False])  # the puller looks first
    monkeypatch.setattr(same_host, "same_user", lambda peer: next(verdicts))
    await falls_back(pair, "an answer that is none")


async def test_a_pool_whose_owner_ended_is_forgotten(pair: Pair) -> None:
    route = await pair.peers.reach(pair.node)
    await served(pair).close()
    await until(lambda: route.source is not None and route.source.gone)
    await falls_back(pair, "not offered on this host")


async def test_the_memory_of_an_owner_that_ended_is_let_go_and_never_read_again(pair: Pair) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("/memfd:" in line for line in maps)

    gc.collect()  # earlier tests' memory
    before = mapped()
    source = (await pair.peers.reach(pair.node)).source
    assert source is not None and mapped() == before + 1
    await served(pair).close()
    await until(lambda: source.gone and mapped() == before)
    with pytest.raises(CopyFailed, match="owner gone"):
        source.copy(pair.puller.cache, [Copy(0, 0, 0, None)])


async def test_where_only_memory_will_do_the_pull_fails(free_port: int) -> None:
    pair = Pair(free_port, NUM_BLOCKS, BLOCK_BYTES, kinds=["memfd"], only="memfd")
    await pair.server.start()  # its memory is not served
    try:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.failed[pull] is Reason.COPY_FAILED
        assert pair.puller.causes[pull] == "memfd: not offered on this host"
        assert len(pair.service) == 0
    finally:
        await pair.close()


async def said(greeting: bytes, descriptors: list[int], incarnation: int) -> str:
    """What is refused when an owner of this name says so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(memfd._address(incarnation))
        listener.listen(1)
        importing = MemfdImport(layout(BLOCK_BYTES))

        def answer() -> None:
            with listener.accept()[0] as peer:
                socket.send_fds(peer, [greeting], descriptors)

        answering = asyncio.create_task(asyncio.to_thread(answer))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NoPath) as refusal:
            await importing.connect(Node("", incarnation, ""), b"")
        await answering
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
    route = await pair.peers.reach(pair.node)
    assert route.source is not None
    route.source.num_blocks = 0
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket)
    pair.compute(ticket)
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.failed[pull] is Reason.COPY_FAILED
    await pair.over()
    assert pair.peers.paths()[0].failures == {"block out of range": 1}


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


async def test_without_digests_blocks_that_follow_each_other_move_together_and_all_others_alone(
    free_port: int,
) -> None:
    pair = Pair(free_port, NUM_BLOCKS, BLOCK_BYTES, kinds=["memfd"], digests=False)
    await pair.start_server()
    try:
        source = (await pair.peers.reach(pair.node)).source
        assert source is not None
        rng = random.Random(8)
        pair.owner.cache.data[:] = rng.randbytes(len(pair.owner.cache.data))
        for order in (range(24), range(23, -1, -1), rng.sample(range(24), 24), [0, 1, 2, 9, 10, 4, 5, 3]):
            to = list(range(len(order)))
            pair.puller.cache.data[:] = bytes(len(pair.puller.cache.data))
            copies = [Copy(block, place, place, None) for place, block in enumerate(order)]
            assert source.copy(pair.puller.cache, copies) == [0] * len(to)
            for place, block in enumerate(order):
                assert pair.puller.cache.block_bytes(place) == pair.owner.cache.block_bytes(block)
    finally:
        await pair.close()
