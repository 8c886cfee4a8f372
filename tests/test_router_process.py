"""The router's process: alive at once, ready when it can serve, one sentence for a mistake, and a drain at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_front import make_model_dir, until
from test_router_sessions import FAKE_MODEL, VOCABULARY, Stage

from decode_service.servicer import DecodeServicer
from engine.fake_runner import fake_tokens
from engine.types import SamplingParams
from pagewire.client import AsyncClient, PagewireError
from prefill_service.servicer import PrefillServicer
from router import assembly, border
from router.config import SAMPLING, Settings, parse
from router.preparing import Prepared
from router.workers import Role
from wire.channel import open_channel, open_server
from wire.health import Health, is_ready
from wire.ports import bind, listen
from wire.security import Security

ROOT = Path(__file__).parent.parent


def start(*flags: str, **options: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "router", "--http-port", "0", *flags]
    return subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )  # type: ignore[call-overload,no-any-return]


def status(port: int, service: str) -> int | None:
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=1).status)
        except grpc.RpcError:
            return None


def wait_alive(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 20
    while status(port, "") != health_pb2.HealthCheckResponse.SERVING:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def finish(process: subprocess.Popen[str], seconds: float = 20) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out, err


# ---- the process --------------------------------------------------------------------------------------------------


def test_it_is_alive_within_a_second_and_not_ready_without_model_and_workers(free_port: int, tmp_path: Path) -> None:
    """The best of three; three times what Python with gRPC takes to start, where that is more than a second."""
    flags = ("--model", "random:tiny", "--cache-dir", str(tmp_path), "--port", str(free_port))
    beyond = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import grpc.aio, grpc_health.v1.health_pb2_grpc"], check=True)
        bare = time.monotonic() - began
        began = time.monotonic()
        process = start(*flags, "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1")
        try:
            wait_alive(free_port, process)
            beyond.append(time.monotonic() - began - max(1.0, 3 * bare))
            assert status(free_port, border.SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            process.terminate()
            code, out, err = finish(process)
        assert code == 0 and "Traceback" not in err, err
        if beyond[-1] < 0:
            break
    assert min(beyond) < 0, beyond


def test_an_unknown_model_ends_it_with_one_sentence_that_lists_what_is_known(free_port: int) -> None:
    code, _, err = finish(start("--model", "no-such-model", "--port", str(free_port)), 60)
    line = err.strip().splitlines()[-1]
    assert code == 2 and line.startswith("pagewire router: there is no model 'no-such-model'") and "smollm2" in line
    assert "Traceback" not in err


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, _, err = finish(start("--model", "random:tiny", "--port", str(port)))
    assert code == 2 and f"port {port} on 127.0.0.1 is taken by" in err and f"pid {os.getpid()}" in err
    assert len(err.strip().splitlines()) == 1


def test_a_bad_flag_is_one_sentence() -> None:
    code, _, err = finish(start("--model", "random:tiny", "--port", "x"))
    assert (
        code == 2
        and err.startswith("pagewire router: argument --port: must be a whole number")
        and err.count("\n") == 1
    )


def test_it_ends_with_its_parent(free_port: int, tmp_path: Path) -> None:
    flags = ["--model", "random:tiny", "--cache-dir", str(tmp_path), "--port", str(free_port)]
    flags += ["--http-port", "0", "--exit-with-parent"]
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-m', 'router', *{flags!r}]); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while status(free_port, "") is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()
        parent.wait()
        while status(free_port, "") is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


# ---- the router in this process, with workers beside it -----------------------------------------------------------


class Running:
    """An assembled router with one worker of each stage, ready to serve."""

    def __init__(self, router: assembly.Router, address: str) -> None:
        self.router = router
        self.address = address
        self.stop = asyncio.Event()
        self.said: list[str] = []
        self.task: asyncio.Task[None] | None = None


@contextlib.asynccontextmanager
async def running(
    directory: Path, monkeypatch: pytest.MonkeyPatch, grace: float, **settings: Any
) -> AsyncIterator[Running]:
    async def prepare(*_: object) -> Prepared:
        await asyncio.sleep(0.3)
        return Prepared("fake", directory, FAKE_MODEL)

    monkeypatch.setattr(assembly, "prepare", prepare)
    stages = [await Stage.start(PrefillServicer), await Stage.start(DecodeServicer)]
    targets = tuple(zip(Role, (f"127.0.0.1:{stage.port}" for stage in stages), strict=True))
    server = open_server(Security(), internal=False)
    health = Health(server, [border.SERVICE])
    said: list[str] = []
    http = listen("127.0.0.1", 0, Security())
    router = assembly.Router(Settings("fake", targets=targets, grace=grace, **settings), health, http, said.append)
    border.add_to_server(lambda: router.service, server)
    port = bind(server, "127.0.0.1", 0, Security())
    await server.start()
    await health.start()
    it = Running(router, f"127.0.0.1:{port}")
    it.said = said
    it.task = asyncio.create_task(router.run(it.stop))
    try:
        yield it
        it.stop.set()
        await it.task
    finally:
        it.task.cancel()
        await asyncio.gather(it.task, return_exceptions=True)
        http.close()
        await server.stop(1)
        for stage in stages:
            await stage.die()


async def test_it_is_ready_when_model_and_workers_are_there_and_says_why_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_model_dir(tmp_path), monkeypatch, 1.0) as it, AsyncClient(it.address) as client:
        with pytest.raises(PagewireError, match="fake is being prepared") as caught:
            await client.models()
        assert caught.value.code == "UNAVAILABLE" and caught.value.retry_after == 2.0
        channel = open_channel(it.address, Security(), internal=False)
        while not await is_ready(channel, border.SERVICE, 1.0):
            await asyncio.sleep(0.02)
        await channel.close()
        assert it.said == ["ready"] and (await client.models())[0].id == "fake"


@pytest.mark.parametrize("own", [True, False])
async def test_the_models_own_sampling_is_told_and_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    directory = make_model_dir(tmp_path, generation_config={"temperature": 0.6, "max_new_tokens": 3})
    flag = parse(["--model", "x", "--generation-config", "auto" if own else "none"], {}).generation_config
    async with (
        running(directory, monkeypatch, 1.0, generation_config=flag) as it,
        AsyncClient(it.address) as client,
    ):
        await until(lambda: "ready" in it.said, 10.0)
        told = f"{SAMPLING} temperature 0.6, max_tokens 3, of generation_config.json"
        assert [line for line in it.said if told in line] == it.said[:-1] and len(it.said) == 1 + own
        result = await client.generate("hello", timeout=20)
        assert (result.usage.completion_tokens == 3) is own


async def test_a_drain_lets_streams_end_and_takes_no_new_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_model_dir(tmp_path), monkeypatch, 10.0) as it, AsyncClient(it.address) as client:
        await until(lambda: "ready" in it.said, 5)
        got: list[int] = []
        async for delta in client.stream([1], SamplingParams(temperature=0, max_tokens=60)):
            got += delta.token_ids
            if len(got) == 10:
                it.stop.set()
                await until(lambda: it.said[-1].startswith("not ready: draining"), 2)
                with pytest.raises(PagewireError, match="shutting down"):
                    await client.generate([1])
        assert got == fake_tokens([1], 60, VOCABULARY)
        assert it.task is not None
        await asyncio.wait_for(it.task, 2)


async def test_after_the_grace_a_stream_is_handed_back_as_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_model_dir(tmp_path), monkeypatch, 0.2) as it, AsyncClient(it.address) as client:
        await until(lambda: "ready" in it.said, 5)
        got: list[int] = []
        with pytest.raises(PagewireError, match="resume elsewhere") as caught:
            async for delta in client.stream([1], SamplingParams(temperature=0, max_tokens=400)):
                got += delta.token_ids
                it.stop.set()
        assert caught.value.code == "UNAVAILABLE" and caught.value.facts["resumable"] == "true"
        assert got == fake_tokens([1], len(got), VOCABULARY)
