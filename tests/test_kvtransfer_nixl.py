"""What a puller by NIXL believes of a READ: nothing is over before NIXL says so. NIXL's part is played."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kvtransfer_cores import layout

from engine.fake_runner import FakeCache
from kvtransfer.paths import Copy, CopyFailed
from kvtransfer.transports import hands, nixl
from kvtransfer.transports.nixl import AT_ONCE, READ_BYTES, NixlSource, Region

BLOCK_BYTES = 1 << 20
BLOCKS = 32


class Disconnected(Exception):
    pass


@dataclass
class Read:
    """One that was made; it is under way until it has an end."""

    blocks: list[tuple[int, int]]  # from, to
    thread: int = field(default_factory=threading.get_native_id)
    end: str | Exception = "PROC"
    released: bool = False


class Played:
    """An agent of NIXL's whose READs end when the test says so."""

    def __init__(self) -> None:
        self.made_by: list[int] = []  # the thread of each READ that was made, posted or not
        self.posted: list[Read] = []
        self.ended = False  # all of them, and those to come

    def make_prepped_xfer(self, operation: str, here: Any, ids: Any, there: Any, from_ids: Any) -> Read:
        self.made_by.append(threading.get_native_id())
        time.sleep(0.001)  # somebody else's turn
        return Read(list(zip(from_ids.tolist(), ids.tolist(), strict=True)))

    def transfer(self, read: Read) -> str:
        self.posted.append(read)
        return "PROC"

    def check_xfer_state(self, read: Read) -> str:
        if isinstance(read.end, Exception):
            raise read.end
        return "DONE" if self.ended else read.end

    def release_xfer_handle(self, read: Read) -> None:
        read.released = True

    def release_dlist_handle(self, blocks: Any) -> None:
        pass

    def remove_remote_agent(self, name: str) -> None:
        pass


def agent_of(played: Played) -> Any:
    return SimpleNamespace(
        nixl=played,
        here=None,
        block_bytes=BLOCK_BYTES,
        binding=threading.Lock(),
        errors=(Disconnected, CopyFailed),
        blocks=lambda owner, region: None,
    )


def source_of(agent: Any) -> NixlSource:
    return NixlSource(agent, "owner", Region(0, BLOCKS, "DRAM"))


def copies(tokens: list[int] | None) -> list[Copy]:
    return [Copy(BLOCKS - 1 - block, block, block, tokens) for block in range(BLOCKS)]


def until(condition: Any) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache(layout(BLOCK_BYTES), BLOCKS)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody helps."""
    monkeypatch.setattr(hands, "ALONE", BLOCKS)


@pytest.fixture
def idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hands, "_waited", lambda: 0.0)


def test_a_read_that_its_owner_does_not_answer_is_waited_for_and_the_owner_given_up(
    cache: FakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer may come after minutes, and is then written wherever it was to go: whose blocks those are by then is
    not NIXL's concern."""
    monkeypatch.setattr(nixl, "PATIENCE_S", 0.05)
    played = Played()
    source = source_of(agent_of(played))
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: source.gone)
        time.sleep(0.2)
        assert not copying.done() and not any(read.released for read in played.posted)
        played.ended = True
        assert len(copying.result(timeout=20)) == BLOCKS
    assert all(read.released for read in played.posted)
    source.close()


@pytest.mark.usefixtures("one_thread")
def test_a_read_that_fails_is_over_when_those_beside_it_are(cache: FakeCache) -> None:
    played = Played()
    source = source_of(agent_of(played))
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: len(played.posted) == 1 + AT_ONCE)
        played.posted[0].end = Disconnected("the owner is gone")
        until(lambda: source.gone)
        time.sleep(0.05)
        assert not copying.done(), "the other may still write"
        played.posted[1].end = "DONE"
        with pytest.raises(CopyFailed, match="NIXL: the owner is gone"):
            copying.result(timeout=20)
    assert len(played.posted) == 2 and all(read.released for read in played.posted)
    source.close()


@pytest.mark.parametrize("of_helper", [False, True])
@pytest.mark.usefixtures("idle_cores")
def test_a_read_that_fails_ends_the_copy_when_those_of_the_other_thread_are_over(
    cache: FakeCache, of_helper: bool
) -> None:
    played = Played()
    source = source_of(agent_of(played))
    with ThreadPoolExecutor(1) as thread:
        mine = thread.submit(threading.get_native_id).result()
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: len(played.posted) == 2 * (1 + AT_ONCE))
        failing = [read for read in played.posted if (read.thread != mine) is of_helper]
        others = [read for read in played.posted if read not in failing]
        assert len(failing) == len(others) == 1 + AT_ONCE
        failing[0].end = Disconnected("the owner is gone")
        failing[1].end = "DONE"
        until(lambda: failing[0].released and failing[1].released)
        time.sleep(0.05)
        assert not copying.done(), "the other thread's may still write"
        for read in others:
            read.end = "DONE"
        with pytest.raises(CopyFailed, match="NIXL: the owner is gone"):
            copying.result(timeout=20)
    assert len(played.posted) == 4, "nothing is read any more"
    assert all(read.released for read in played.posted)
    source.close()


def test_the_end_of_the_process_waits_for_no_read(cache: FakeCache) -> None:
    played = Played()
    source = source_of(agent_of(played))
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: len(played.posted) >= 2)
        source.abort()
        with pytest.raises(CopyFailed, match="this process ends"):
            copying.result(timeout=20)
    assert not any(read.released for read in played.posted)
    source.close()


@pytest.mark.parametrize("tokens", [[1], None])
@pytest.mark.usefixtures("idle_cores")
def test_every_block_is_read_once_in_fewer_reads_than_there_are_blocks(
    cache: FakeCache, tokens: list[int] | None
) -> None:
    played = Played()
    played.ended = True
    source = source_of(agent_of(played))
    wanted = copies(tokens)
    found = source.copy(cache, wanted)
    assert len(played.posted) == BLOCKS * BLOCK_BYTES // READ_BYTES
    read = [blocks for each in played.posted for blocks in each.blocks]
    assert sorted(read) == sorted((each.source, each.destination) for each in wanted)
    assert source.operations == len(played.posted)
    digests = [0 if tokens is None else cache.digest(each.destination, each.position, tokens) for each in wanted]
    assert found == digests
    source.close()


def test_the_two_threads_of_a_source_make_their_first_read_in_a_row_whoever_else_begins(cache: FakeCache) -> None:
    """NIXL deals out its workers in that order: two threads with one worker would read one after the other."""
    played = Played()
    played.ended = True
    agent = agent_of(played)
    sources = [source_of(agent) for _ in range(4)]
    threads = [ThreadPoolExecutor(1) for _ in sources]
    begun = [thread.submit(source.copy, cache, copies([1])) for thread, source in zip(threads, sources, strict=True)]
    for each in begun:
        each.result(timeout=20)
    order = list(dict.fromkeys(played.made_by))
    mine = [thread.submit(threading.get_native_id).result() for thread in threads]
    assert len(order) == 2 * len(sources)
    assert [number % 2 for number, thread in enumerate(order) if thread in mine] == [0] * len(sources)
    for thread, source in zip(threads, sources, strict=True):
        source.close()
        thread.shutdown()


def test_threads_of_a_source_end_with_it(cache: FakeCache) -> None:
    played = Played()
    played.ended = True
    before = threading.active_count()
    source = source_of(agent_of(played))
    source.copy(cache, copies([1]))
    source.close()
    until(lambda: threading.active_count() <= before)
