"""What a puller by NIXL believes of a READ: nothing is over before NIXL says so. NIXL's part is played."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from kvtransfer_cores import layout

from engine.fake_runner import FakeCache
from kvtransfer.paths import Copy, CopyFailed
from kvtransfer.transports import nixl
from kvtransfer.transports.nixl import GROUP_BYTES, NixlSource, Region

BLOCK_BYTES = 1 << 20
BLOCKS = 32


class Disconnected(Exception):
    pass


class Played:
    """An agent of NIXL's whose READs end when the test says so."""

    def __init__(self) -> None:
        self.posted: list[int] = []  # blocks of each READ
        self.released: list[int] = []
        self.ends: dict[int, str | Exception] = {}  # READ -> its end; one that is missing is under way

    def make_prepped_xfer(self, operation: str, here: Any, ids: Any, there: Any, from_ids: Any) -> int:
        self.posted.append(len(ids))
        return len(self.posted) - 1

    def transfer(self, transfer: int) -> str:
        return "PROC"

    def check_xfer_state(self, transfer: int) -> str:
        end = self.ends.get(transfer, "PROC")
        if isinstance(end, Exception):
            raise end
        return end

    def release_xfer_handle(self, transfer: int) -> None:
        self.released.append(transfer)

    def release_dlist_handle(self, blocks: Any) -> None:
        pass

    def remove_remote_agent(self, name: str) -> None:
        pass

    def end_all(self) -> None:
        self.ends = {number: "DONE" for number in range(100)}


def source_of(played: Played) -> NixlSource:
    agent: Any = SimpleNamespace(
        nixl=played,
        here=None,
        block_bytes=BLOCK_BYTES,
        errors=(Disconnected, CopyFailed),
        blocks=lambda owner, region: None,
    )
    return NixlSource(agent, "owner", Region(0, BLOCKS, "DRAM"))


def copies(tokens: list[int] | None) -> list[Copy]:
    return [Copy(block, block, block, tokens) for block in range(BLOCKS)]


def until(condition: Any) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache(layout(BLOCK_BYTES), BLOCKS)


def test_a_read_that_its_owner_does_not_answer_is_waited_for_and_the_owner_given_up(
    cache: FakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer may come after minutes, and is then written wherever it was to go: whose blocks those are by then is
    not NIXL's concern."""
    monkeypatch.setattr(nixl, "PATIENCE_S", 0.05)
    played = Played()
    source = source_of(played)
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: source.gone)
        time.sleep(0.2)
        assert not copying.done() and played.released == []
        played.end_all()
        assert len(copying.result(timeout=20)) == BLOCKS
    assert sorted(played.released) == list(range(len(played.posted)))
    source.close()


def test_a_read_that_fails_is_over_when_those_beside_it_are(cache: FakeCache) -> None:
    played = Played()
    source = source_of(played)
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: len(played.posted) == 2)
        played.ends[0] = Disconnected("the owner is gone")
        until(lambda: source.gone)
        time.sleep(0.05)
        assert not copying.done(), "the other may still write"
        played.ends[1] = "DONE"
        with pytest.raises(CopyFailed, match="NIXL: the owner is gone"):
            copying.result(timeout=20)
    assert sorted(played.released) == [0, 1]
    source.close()


def test_the_end_of_the_process_waits_for_no_read(cache: FakeCache) -> None:
    played = Played()
    source = source_of(played)
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(source.copy, cache, copies([1]))
        until(lambda: len(played.posted) == 2)
        source.abort()
        with pytest.raises(CopyFailed, match="this process ends"):
            copying.result(timeout=20)
    assert played.released == []
    source.close()


def test_reads_are_smaller_at_the_end_and_one_alone_where_nothing_is_digested(cache: FakeCache) -> None:
    played = Played()
    played.end_all()
    source = source_of(played)
    source.copy(cache, copies([1]))
    assert played.posted[0] == GROUP_BYTES // BLOCK_BYTES and played.posted[-1] == 1
    assert sum(played.posted) == BLOCKS and len(played.posted) <= BLOCKS + 2
    played.posted.clear()
    source.copy(cache, copies(None))
    assert played.posted == [BLOCKS]
    source.close()


def test_threads_of_a_source_end_with_it(cache: FakeCache) -> None:
    played = Played()
    played.end_all()
    before = threading.active_count()
    source = source_of(played)
    source.copy(cache, copies([1]))
    source.close()
    until(lambda: threading.active_count() <= before)
