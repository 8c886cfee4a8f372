"""Fixtures for every test: free ports, leak checks, and a cluster of real processes on a tiny random model.

After each test no process that it started may be alive and no asyncio task may be left on its loop. Shared clusters
are the only exception, and their processes are gone when the session ends.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before grpc loads: tests start processes, none forks on

import psutil  # noqa: E402
import pytest  # noqa: E402
import uvloop  # noqa: E402
from cluster import SHARED_CLUSTERS, Cluster, running_cluster  # noqa: E402

GRACE = 3.0  # seconds that processes and tasks have to end after their test


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], object]]:
    """Tests run on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """free_ports(n): n different TCP ports on 127.0.0.1 that nothing listens on at this moment."""
    return _free_ports


@pytest.fixture
def not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on find no package metadata of pagewire, as in a source tree."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n_of = m.distribution\ndef distribution(name):\n    if name == 'pagewire':\n"
        "        raise m.PackageNotFoundError(name)\n    return _of(name)\nm.distribution = distribution\n"
    )
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.fixture
def free_port() -> int:
    return _free_ports(1)[0]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


# ---- leaks --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child process; set up first, so that it looks after every other fixture is done."""
    before = set(psutil.Process().children(recursive=True))
    yield
    allowed = before | _shared_processes(request.config)
    deadline = time.monotonic() + GRACE
    while left := [child for child in psutil.Process().children(recursive=True) if child not in allowed]:
        if time.monotonic() > deadline:
            lines = [f"{child.pid}: {_command_line(child)}" for child in left]
            for child in left:
                child.kill()
            pytest.fail("processes left by this test: " + "; ".join(lines))
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_task_left(request: pytest.FixtureRequest, no_process_left: None) -> None:
    function = getattr(request.node, "obj", None)
    if inspect.iscoroutinefunction(function):
        request.getfixturevalue("_no_task_left")


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    yield
    deadline = time.monotonic() + GRACE
    while left := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
        if time.monotonic() > deadline:
            pytest.fail("tasks left by this test: " + "; ".join(repr(task) for task in left))
        await asyncio.sleep(0.01)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


# ---- real processes -----------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHARED_CLUSTERS] = []


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's random models are made, once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_cache: Path
) -> Iterator[Cluster]:
    """Router, one prefill and one decode worker on random:tiny. Shared by the session: never kill a part of it."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), cache_dir=model_cache) as running:
        request.config.stash[SHARED_CLUSTERS].append(running)
        yield running


@pytest.fixture(scope="session")
def _two_of_each(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_cache: Path
) -> Iterator[Cluster]:
    options = {"prefill": 2, "decode": 2, "max_num_batched_tokens": 64, "cache_dir": model_cache}
    with running_cluster(tmp_path_factory.mktemp("two"), **options) as running:
        request.config.stash[SHARED_CLUSTERS].append(running)
        yield running


@pytest.fixture
def breakable(_two_of_each: Cluster) -> Iterator[Cluster]:
    """Router and two workers of each stage, prefill in chunks of 64: killed as a test likes, whole again after it."""
    programs = dict(_two_of_each.programs)
    yield _two_of_each
    _two_of_each.programs = programs
    _two_of_each.restore()


def _shared_processes(config: pytest.Config) -> set[psutil.Process]:
    allowed = set()
    for pid in (pid for cluster in config.stash[SHARED_CLUSTERS] for pid in cluster.pids()):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            allowed |= {process, *process.children(recursive=True)}
    return allowed
