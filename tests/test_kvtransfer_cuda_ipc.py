"""Blocks from card to card, on an emulated card and over real sockets: what is copied, digested, refused and let go."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from emulated_gpu import EmulatedGpu

from engine.cuda_cache import CudaKVCache
from engine.messages import KvLayout, Node
from kvtransfer.paths import Copy, CopyFailed, NoPath
from kvtransfer.transports import cuda_ipc, same_host
from kvtransfer.transports.cuda_ipc import CudaIpcExport, CudaIpcImport, CudaIpcSource

LAYOUT = KvLayout(b"m", "float32", 16, 2, 2, 8, 4096, "a card")


def cache(blocks: int, seed: int, layout: KvLayout = LAYOUT) -> CudaKVCache:
    gpu: Any = EmulatedGpu()
    made = CudaKVCache(layout, blocks, gpu)
    for block in range(blocks):
        made.write(block, 0, random.Random(seed + block).randbytes(layout.block_bytes))
    return made


def opened(held: CudaKVCache) -> list[int]:
    gpu: Any = held._gpu
    return list(gpu.opened)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.002)


class Two:
    """An owner's cache and its export, a puller's and its import."""

    def __init__(self) -> None:
        self.node = Node("prefill-0", random.getrandbits(64), "127.0.0.1:1")
        self.owner, self.puller = cache(9, 100), cache(6, 900)
        self.exports = CudaIpcExport(self.node.incarnation, self.owner)
        self.imports = CudaIpcImport(self.puller)

    async def connect(self) -> CudaIpcSource:
        return await self.imports.connect(self.node, await self.exports.offer())


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    two = Two()
    two.exports.start()
    yield two
    await two.imports.close()
    await two.exports.close()


async def test_blocks_come_by_id_in_one_kernel_with_the_digests_that_their_owner_announces(two: Two) -> None:
    source = await two.connect()
    copies = [Copy(source=8, position=0, destination=2, tokens=[1, 2]), Copy(3, 1, 5, [3]), Copy(0, 2, 0, [])]
    before: Any = two.puller._gpu
    before.launched.clear()
    digests = await asyncio.to_thread(source.copy, two.puller, copies)
    assert before.launched == ["copy_and_digest"] and source.operations == 1
    assert digests == [two.owner.digest(each.source, each.position, each.tokens or ()) for each in copies]
    for each in copies:
        assert two.puller.block_bytes(each.destination) == two.owner.block_bytes(each.source)
    assert source.num_blocks == 9
    source.close()


async def test_without_digests_none_are_reported(two: Two) -> None:
    source = await two.connect()
    assert source.copy(two.puller, [Copy(1, 0, 1, None)]) == [0]
    source.close()


async def test_bytes_that_changed_after_they_were_announced_have_another_digest(two: Two) -> None:
    source = await two.connect()
    announced = two.owner.digest(4, 0, [7])
    two.owner.write(4, 1000, b"\x01")
    assert source.copy(two.puller, [Copy(4, 0, 3, [7])]) != [announced]
    source.close()


async def test_the_memory_of_an_owner_that_died_is_let_go_and_never_read_again(two: Two) -> None:
    source = await two.connect()
    assert opened(two.puller) and not source.gone
    await two.exports.close()  # its end of the socket closes, as when the process dies
    await until(lambda: source.gone and not opened(two.puller))
    with pytest.raises(CopyFailed, match="owner gone"):
        source.copy(two.puller, [Copy(0, 0, 0, None)])
    source.close()


async def test_an_owner_that_dies_while_a_copy_is_under_way_is_let_go_after_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await two.connect()
    begun, go_on = threading.Event(), threading.Event()
    copy = two.puller.copies.copy

    def slow(*arguments: Any) -> list[int]:
        begun.set()
        assert go_on.wait(30.0)
        assert opened(two.puller), "the memory is mapped until the copy has ended"
        return copy(*arguments)

    monkeypatch.setattr(two.puller.copies, "copy", slow)
    copying = asyncio.create_task(asyncio.to_thread(source.copy, two.puller, [Copy(2, 0, 4, [1])]))
    await asyncio.to_thread(begun.wait)
    await two.exports.close()
    await until(lambda: source.gone)
    assert opened(two.puller)
    go_on.set()
    assert await copying == [two.owner.digest(2, 0, [1])]  # whether it may be believed is asked of the owner
    await until(lambda: not opened(two.puller))
    source.close()


async def test_a_card_that_fails_fails_the_copy_with_its_reason(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    source = await two.connect()

    def broken(*_: Any) -> list[int]:
        raise RuntimeError("the CUDA driver answered CUDA_ERROR_ECC_UNCORRECTABLE\nsecond line")

    monkeypatch.setattr(two.puller.copies, "copy", broken)
    with pytest.raises(CopyFailed, match="ECC_UNCORRECTABLE$"):
        source.copy(two.puller, [Copy(0, 0, 0, None)])
    source.close()


async def test_closing_from_another_thread_lets_go_at_once(two: Two) -> None:
    source = await two.connect()
    await asyncio.to_thread(source.close)
    assert not opened(two.puller)
    await until(lambda: len(two.exports) == 0)
    source.close()  # twice does nothing


# ---- refusals -----------------------------------------------------------------------------------------------------


async def refusal(two: Two, reason: str) -> None:
    with pytest.raises(NoPath, match=reason):
        await two.connect()
    assert sum(two.imports.refused.values()) == 1 and not opened(two.puller)


async def test_an_owner_that_is_not_there_is_no_path(two: Two) -> None:
    two.node = two.node._replace(incarnation=1)
    await refusal(two, "not offered on this host")


async def test_another_layout_is_no_path(two: Two) -> None:
    two.imports = CudaIpcImport(cache(2, 0, LAYOUT._replace(numerics="another card")))
    two.puller = two.imports._cache  # type: ignore[assignment]
    await refusal(two, "another layout")


async def test_a_card_that_the_driver_does_not_let_reach_is_no_path(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: bytes) -> int:
        raise RuntimeError("the CUDA driver answered CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    monkeypatch.setattr(two.puller, "open", refuse)
    await refusal(two, "this card cannot reach its memory: .*PEER_ACCESS_UNSUPPORTED")


async def test_a_pool_of_more_blocks_than_its_memory_holds_is_no_path(two: Two) -> None:
    await two.exports.close()
    two.node = two.node._replace(incarnation=random.getrandbits(64))
    two.owner.num_blocks += 1
    two.exports = CudaIpcExport(two.node.incarnation, two.owner)
    two.exports.start()
    await refusal(two, "a pool of 10 blocks in memory for 9")


async def test_a_driver_that_cannot_tell_the_size_of_opened_memory_is_no_obstacle(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.puller._gpu, "size", lambda address: None)
    (await two.connect()).close()


async def test_another_users_process_gets_no_handle(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    await refusal(two, "its owner is another user")
    await until(lambda: two.exports.refused["another user"] == 1)


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"", "an answer that is none"),
        (b"too short", "an answer that is none"),
        (bytes(cuda_ipc._GREETING.size + 1), "an answer that is none"),
        (bytes(cuda_ipc._GREETING.size), "another incarnation"),
    ],
)
async def test_an_answer_that_is_none_is_no_path(two: Two, greeting: bytes, reason: str) -> None:
    two.node = two.node._replace(incarnation=random.getrandbits(64))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(cuda_ipc._address(two.node.incarnation))
    listener.listen(1)

    def answer() -> None:
        peer, _ = listener.accept()
        with peer:
            if greeting:
                peer.send(greeting)

    answering = asyncio.create_task(asyncio.to_thread(answer))
    await refusal(two, reason)
    await answering
    listener.close()


async def test_a_pool_that_the_driver_does_not_export_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    held = cache(2, 0)

    def refuse() -> bytes:
        raise RuntimeError("the CUDA driver answered CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(held, "export", refuse)
    with pytest.raises(NoPath, match="cannot be exported"):
        CudaIpcExport(1, held)


async def test_a_pool_is_given_to_a_bounded_number_of_processes(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host, "MAX_PEERS", 2)
    sources = [await two.connect() for _ in range(2)]
    with pytest.raises(NoPath, match="an answer that is none"):
        await two.connect()
    assert two.exports.refused["too many peers"] == 1
    for source in sources:
        source.close()
