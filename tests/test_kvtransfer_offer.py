"""What a worker offers, and what a user reads where a way to move blocks cannot be had."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.fake_runner import FakeRunner
from engine.messages import Node
from engine.shared_memory import SharedMemory
from kvtransfer.offer import owner_transports, puller_transports
from kvtransfer.paths import NoPath
from kvtransfer.startup import Engine
from kvtransfer.transports import nixl
from wire.worker import CannotStart

NODE = Node("prefill-0", 77, "127.0.0.1:1")
CONFIG = EngineConfig(block_size=16, num_blocks=8)


def engine(*, shared: bool = True) -> Engine:
    runner = FakeRunner(16, 8)
    memory = SharedMemory(9 * runner.layout.block_bytes) if shared else None
    return Engine(runner, CONFIG, runner.layout, "fake", memory)


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def missing(name: str, *more: Any) -> Any:
        return None if name.startswith("nixl") else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", missing)


def test_grpc_is_offered_last_and_what_is_missing_has_its_reason(without_nixl: None) -> None:
    for made in (owner_transports("auto", engine(), NODE), puller_transports("auto", engine(), NODE)):
        assert list(made.kinds) == ["memfd", "grpc"]
        assert made.missing == {"nixl": "it is not installed; pip install 'pagewire[nixl]'"}
        assert str(made) == "KV by memfd or grpc"


@pytest.mark.parametrize("make", [owner_transports, puller_transports])
def test_a_way_that_the_user_insists_on_and_that_is_not_installed_ends_the_worker(
    make: Any, without_nixl: None
) -> None:
    with pytest.raises(CannotStart) as caught:
        make("nixl", engine(), NODE)
    said = "--transport nixl cannot be had here: it is not installed; pip install 'pagewire[nixl]'"
    assert str(caught.value) == said


@pytest.fixture
def broken_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise NoPath("it cannot be loaded: libucp.so.0: no such file")

    monkeypatch.setattr(nixl, "available", lambda: None)
    monkeypatch.setattr(nixl, "_load", broken)


@pytest.mark.parametrize("make", [owner_transports, puller_transports])
async def test_a_way_that_the_user_insists_on_and_that_does_not_start_ends_the_worker(
    make: Any, broken_nixl: None
) -> None:
    with pytest.raises(CannotStart) as caught:
        await make("nixl", engine(), NODE).prove()
    assert str(caught.value) == "--transport nixl cannot be had here: it cannot be loaded: libucp.so.0: no such file"


@pytest.mark.parametrize("make", [owner_transports, puller_transports])
async def test_a_way_that_nobody_insists_on_is_not_started_before_a_pair_needs_it(make: Any, broken_nixl: None) -> None:
    made = make("auto", engine(), NODE)
    await made.prove()
    assert list(made.kinds) == ["memfd", "nixl", "grpc"]


@pytest.mark.parametrize("make", [owner_transports, puller_transports])
def test_a_card_s_way_is_refused_on_the_cpu(make: Any) -> None:
    with pytest.raises(CannotStart, match="--transport cuda_ipc cannot be had here: it moves blocks of a card's"):
        make("cuda_ipc", engine(), NODE)


def test_memory_that_is_not_shared_cannot_be_offered() -> None:
    with pytest.raises(CannotStart, match="this worker's are not shared"):
        owner_transports("memfd", engine(shared=False), NODE)
    assert "memfd" in owner_transports("auto", engine(shared=False), NODE).missing


def test_one_way_alone_is_offered_if_the_user_says_so() -> None:
    assert list(owner_transports("memfd", engine(), NODE).kinds) == ["memfd"]
    assert list(puller_transports("grpc", engine(), NODE).kinds) == ["grpc"]
    assert [offer.kind for offer in puller_transports("grpc", engine(), NODE).offers] == ["grpc"]
