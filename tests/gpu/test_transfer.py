"""Blocks between two processes on one card: every byte, its digest, and an owner that is killed at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.backend import launches  # noqa: E402
from engine.backend.cuda import Gpu  # noqa: E402
from engine.batch import DigestRequest  # noqa: E402
from engine.cuda_cache import CudaKVCache  # noqa: E402
from engine.cuda_copies import Copies  # noqa: E402
from engine.kv_digest import block_sum  # noqa: E402
from engine.messages import KvLayout, Node  # noqa: E402
from kvtransfer.paths import Copy, CopyFailed, NoPath  # noqa: E402
from kvtransfer.transports.cuda_ipc import CudaIpcExport, CudaIpcImport, CudaIpcSource  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SIZES = (4096, 12288, 368640, 2 << 20)  # smaller than a step of the kernel, no whole number of them, and one that is
BLOCKS = 48


def layout(size: int) -> KvLayout:
    """Of blocks of so many bytes."""
    return KvLayout(b"test", "bfloat16", 16, size // 1024, 2, 8, size, "a card")


def pool(size: int, blocks: int, gpu: Gpu) -> CudaKVCache:
    made = CudaKVCache(layout(size), blocks, gpu)
    made._raw.copy_(torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return made


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    found = Gpu()
    found.compile(launches.copy_blocks(size, 1).kernel for size in SIZES)
    return found


# ---- the kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctas", [1, 7, 64, 264])
@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_copied_and_summed_by_id_and_no_other_is_touched(gpu: Gpu, size: int, ctas: int) -> None:
    source, target = pool(size, 40, gpu), pool(size, 50, gpu)
    before, origin = target._raw.cpu(), source._raw.cpu()
    copies = Copies(gpu, target._raw, size, ctas)
    for count in (1, 2, 17, 33):
        from_ids, to_ids = random.sample(range(40), count), random.sample(range(50), count)
        sums = copies.copy(source._raw.data_ptr(), from_ids, to_ids)
        before[to_ids] = origin[from_ids]
        assert torch.equal(target._raw.cpu(), before)
        assert sums == [block_sum(origin[block].numpy().tobytes()) for block in from_ids]
        assert sums == copies.sums(to_ids)


def test_a_steps_digests_are_those_of_single_blocks(gpu: Gpu) -> None:
    held = pool(368640, 8, gpu)
    asked = [DigestRequest(block, block, [block] * 16) for block in (3, 0, 7)]
    with gpu.on_stream():
        launched = held.launch_digests(asked)
        done = gpu.mark()
    done.synchronize()
    assert held.digests(asked, launched) == [held.digest(ask.block, ask.position, ask.tokens) for ask in asked]


# ---- two processes ------------------------------------------------------------------------------------------------


def own(size: int, incarnation: int) -> None:
    """The owner's process: says its blocks' sums, and serves its pool until its input ends or it is killed."""
    held = pool(size, BLOCKS, Gpu())

    async def serve() -> None:
        export = CudaIpcExport(incarnation, held)
        export.start()
        print(json.dumps(held.copies.sums(range(BLOCKS))), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await export.close()

    asyncio.run(serve())


class Owner:
    def __init__(self, size: int) -> None:
        self.node = Node("owner", random.getrandbits(64), "")
        path = os.pathsep.join([str(ROOT), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(size), str(self.node.incarnation)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self.process.stdout
        self.sums: list[int] = json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        with self.process:  # which waits, and closes the pipes
            self.process.kill()


@pytest.fixture
def owner() -> Iterator[Owner]:
    started = Owner(2 << 20)
    yield started
    started.kill()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def with_source(gpu: Gpu, owner: Owner, body: Callable[[CudaKVCache, CudaIpcSource], Any]) -> None:
    """Runs `body`, a coroutine function, with a pool of this process and the owner's within reach."""

    async def run() -> None:
        held = pool(2 << 20, BLOCKS, gpu)
        source = await CudaIpcImport(held).connect(owner.node, b"")
        try:
            await body(held, source)
        finally:
            source.close()

    asyncio.run(run())


def copies_of(rng: random.Random, count: int) -> list[Copy]:
    pairs = zip(rng.sample(range(BLOCKS), count), rng.sample(range(BLOCKS), count), strict=True)
    return [Copy(source, number, target, [number]) for number, (source, target) in enumerate(pairs)]


def test_another_processes_blocks_arrive_with_the_sums_that_it_announced(gpu: Gpu, owner: Owner) -> None:
    async def body(held: CudaKVCache, source: CudaIpcSource) -> None:
        rng = random.Random(0)
        for count in (1, 5, BLOCKS):
            copies = copies_of(rng, count)
            digests = await asyncio.to_thread(source.copy, held, copies)
            assert held.copies.sums([each.destination for each in copies]) == [owner.sums[c.source] for c in copies]
            assert digests == [held.digest(c.destination, c.position, c.tokens or ()) for c in copies]

    with_source(gpu, owner, body)


def test_the_driver_tells_how_many_blocks_another_process_s_memory_holds(gpu: Gpu, owner: Owner) -> None:
    async def body(held: CudaKVCache, source: CudaIpcSource) -> None:
        assert source._address is not None
        assert held.room(source._address) == BLOCKS

    with_source(gpu, owner, body)


def test_an_owner_that_is_killed_is_noticed_and_its_memory_goes_back_to_the_card(gpu: Gpu, owner: Owner) -> None:
    async def body(held: CudaKVCache, source: CudaIpcSource) -> None:
        source.copy(held, copies_of(random.Random(1), 4))
        owner.kill()
        await until(lambda: source.gone)
        await until(lambda: source._address is None)
        with pytest.raises(CopyFailed, match="owner gone"):
            source.copy(held, copies_of(random.Random(1), 4))
        with pytest.raises(NoPath, match="not offered on this host"):
            await CudaIpcImport(held).connect(owner.node, b"")

    with_source(gpu, owner, body)
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()  # the card still works


def test_an_owner_that_is_killed_under_a_stream_of_copies_harms_nobody_else(gpu: Gpu, owner: Owner) -> None:
    """Each copy either ends with the bytes that were announced, or is refused by name."""

    async def body(held: CudaKVCache, source: CudaIpcSource) -> None:
        rng, stop, refused = random.Random(2), threading.Event(), list[str]()

        def copy() -> int:
            done = 0
            while not stop.is_set():
                copies = copies_of(rng, 16)
                try:
                    source.copy(held, copies)
                except CopyFailed as failure:
                    refused.append(str(failure))
                    return done
                assert held.copies.sums([c.destination for c in copies]) == [owner.sums[c.source] for c in copies]
                done += 1
            return done

        copying = asyncio.create_task(asyncio.to_thread(copy))
        await asyncio.sleep(0.2)
        owner.kill()
        deadline = time.monotonic() + 10
        while not copying.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        stop.set()
        assert await copying > 0 and refused == ["owner gone"]

    with_source(gpu, owner, body)
    torch.cuda.synchronize()


if __name__ == "__main__":
    own(int(sys.argv[1]), int(sys.argv[2]))
