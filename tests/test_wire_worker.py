"""A worker process as its operator sees it: sentences, exit codes, health, signals. Real processes, a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from engine.messages import FirstToken, Reason, Refused
from tests.test_prefill_service_servicer import Router
from wire.channel import open_channel
from wire.health import is_ready
from wire.security import Security

SERVICE = "pagewire.v1.PrefillService"
# A prefill worker on a FakeRunner; the model "slow" never finishes loading, "broken" fails in a way nobody foresaw, and
# "hangs" takes two seconds for each step, where half a second is too long.
PROGRAM = """
import sys, time
from kvtransfer import driver
from prefill_service.config import ROLE
from prefill_service.servicer import PrefillServicer
from tests.test_prefill_service_servicer import fake_engine
from wire.worker import CannotStart, run_worker

def assemble(options, say):
    if options.model == "unknown":
        raise CannotStart("no model is called unknown")
    if options.model == "broken":
        raise KeyError("surprise")
    while options.model == "slow":
        say("reading")
        time.sleep(0.2)
    engine = fake_engine(options, say)
    if options.model == "hangs":
        driver.STUCK_S, engine.runner.step_seconds = 0.5, 2.0
    return engine

sys.exit(run_worker(ROLE, lambda options: PrefillServicer(options, assemble)))
"""


class Worker:
    def __init__(self, port: int, *argv: str) -> None:
        self.port = port
        command = [sys.executable, "-c", PROGRAM, "--port", str(port), "--http-port", "0", *argv]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
        )

    def wait_for(self, words: str) -> str:
        """The first line on stdout that holds `words`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return line
        pytest.fail(f"{words!r} did not come: {self.end()}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@contextlib.contextmanager
def worker(port: int, *argv: str) -> Iterator[Worker]:
    started = Worker(port, *argv)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


async def ready(port: int, service: str) -> bool:
    channel = open_channel(f"127.0.0.1:{port}", Security(), internal=True)
    try:
        return await is_ready(channel, service, 5.0)
    finally:
        await channel.close()


async def test_a_worker_is_alive_while_it_loads_and_ready_afterwards(free_port: int) -> None:
    with worker(free_port, "--model", "slow") as slow:
        slow.wait_for("reading")
        assert await ready(free_port, "") and not await ready(free_port, SERVICE)
    with worker(free_port, "--model", "fake") as quick:
        assert f"ready at 127.0.0.1:{free_port}" in quick.wait_for("ready")
        assert await ready(free_port, "") and await ready(free_port, SERVICE)


def test_sigterm_drains_and_exits_with_0(free_port: int) -> None:
    with worker(free_port, "--model", "fake") as it:
        it.wait_for("ready")
        it.process.send_signal(signal.SIGTERM)
        code, out, err = it.end()
        assert code == 0 and "draining" in out and "stopped" in out
        assert err == ""


async def test_a_worker_whose_step_does_not_end_is_alive_and_not_ready_until_it_does(free_port: int) -> None:
    with worker(free_port, "--model", "hangs") as it:
        it.wait_for("ready")
        channel = open_channel(f"127.0.0.1:{free_port}", Security(), internal=True)
        router = Router(channel)
        router.start(1, [1, 2, 3])
        async with asyncio.timeout(10):
            while await ready(free_port, SERVICE):
                await asyncio.sleep(0.05)
            assert await ready(free_port, "") and not any(isinstance(each, FirstToken) for each in router.events)
            while not await ready(free_port, SERVICE):
                await asyncio.sleep(0.05)
        await router.get(FirstToken)
        await router.end()
        await channel.close()
        it.wait_for("not ready: a step does not end")
        it.wait_for("ready again")


async def test_a_second_signal_ends_a_drain_at_once(free_port: int) -> None:
    with worker(free_port, "--model", "fake") as it:
        it.wait_for("ready")
        channel = open_channel(f"127.0.0.1:{free_port}", Security(), internal=True)
        router = Router(channel)
        router.start(1, list(range(40)))
        await router.get(FirstToken)  # now a lease is held, and nobody pulls it
        it.process.send_signal(signal.SIGTERM)
        it.wait_for("draining")
        assert await ready(free_port, "") and not await ready(free_port, SERVICE)
        router.start(2, [1, 2, 3])
        assert (await router.get(Refused)).reason is Reason.DRAINING
        it.process.send_signal(signal.SIGTERM)
        assert it.end()[0] == 128 + signal.SIGTERM
        await router.end()
        await channel.close()


async def test_a_drain_ends_when_the_last_router_is_gone(free_port: int) -> None:
    with worker(free_port, "--model", "fake") as it:
        it.wait_for("ready")
        channel = open_channel(f"127.0.0.1:{free_port}", Security(), internal=True)
        router = Router(channel)
        router.start(1, list(range(40)))
        await router.get(FirstToken)
        it.process.send_signal(signal.SIGTERM)
        it.wait_for("draining")
        await router.end()
        assert it.end()[0] == 0
        await channel.close()


def test_sigterm_while_loading_ends_at_once(free_port: int) -> None:
    with worker(free_port, "--model", "slow") as it:
        it.wait_for("reading")
        it.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert it.end()[0] == 0 and time.monotonic() - began < 2


def test_a_taken_port_is_named_with_its_holder(free_port: int) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        with worker(free_port, "--model", "slow") as it:  # the model is not touched: it would load for ever
            code, _, err = it.end()
            assert code == 2 and err.count("\n") == 1
            assert f"port {free_port}" in err and f"pid {os.getpid()}" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "unknown"], "no model is called unknown"),
        (["--model", "fake", "--block-size", "5"], "--block-size"),
        (["--model", "fake", "--host", "0.0.0.0"], "--insecure"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(free_port: int, argv: list[str], words: str) -> None:
    with worker(free_port, *argv) as it:
        code, _, err = it.end()
        assert code == 2 and words in err and err.count("\n") == 1
        assert "Traceback" not in err


def test_an_internal_error_ends_with_a_sentence_and_exit_code_1(free_port: int) -> None:
    with worker(free_port, "--model", "broken") as it:
        code, _, err = it.end()
        assert code == 1 and err.splitlines()[-1].startswith("pagewire prefill: internal error: KeyError")


def test_a_worker_ends_when_its_parent_is_killed(free_port: int) -> None:
    parent = f"""
import subprocess, sys
argv = ["--model", "fake", "--port", "{free_port}", "--exit-with-parent"]
child = subprocess.Popen([sys.executable, "-c", {PROGRAM!r}, *argv])
print(child.pid, flush=True)
child.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    for line in process.stdout:
        if "ready" in line:
            break
    process.kill()
    process.communicate()
    give_up = time.monotonic() + 10
    while os.path.exists(f"/proc/{child}") and "zombie" not in _state(child):
        assert time.monotonic() < give_up, "the worker outlived its parent"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return next(line for line in file if line.startswith("State"))
    except (FileNotFoundError, ProcessLookupError):
        return "zombie"
