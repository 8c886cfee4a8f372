"""What `pagewire up` starts, on which ports, and that nothing of it ever survives."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from pagewire.cli.deployment import Deployment, Died, Topology, check_ports, programs
from pagewire.cli.failure import CommandFailed
from pagewire.cli.phases import Phases
from pagewire.cli.processes import Child, Program, readable


def script(name: str, code: str) -> Program:
    return Program(name, name.split("-")[0], (sys.executable, "-c", code), "127.0.0.1:1", "none")


def flag(program: Program, name: str) -> str:
    return program.argv[list(program.argv).index(name) + 1]


def test_the_nth_worker_of_a_kind_adds_n_minus_one_to_its_port() -> None:
    router, *workers = programs(Topology("smollm2", prefill=2, decode=3))
    assert [worker.address.split(":")[1] for worker in workers] == ["50061", "50062", "50071", "50072", "50073"]
    assert [worker.name for worker in workers] == ["prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3"]
    assert flag(router, "--prefill") == "127.0.0.1:50061,127.0.0.1:50062"
    assert flag(router, "--decode") == "127.0.0.1:50071,127.0.0.1:50072,127.0.0.1:50073"


def test_workers_share_the_cores_and_every_process_ends_with_its_parent() -> None:
    started = programs(Topology("smollm2", prefill=2, decode=2))
    assert all("--exit-with-parent" in program.argv for program in started)
    assert [flag(worker, "--workers-on-host") for worker in started[1:]] == ["4"] * 4
    assert "--threads" not in started[1].argv, "the worker's own rule decides"


def test_workers_that_share_a_card_are_told_its_share_and_the_router_is_not() -> None:
    router, *workers = programs(Topology("smollm2", device="cuda", gpu_memory_utilization=0.5))
    assert [flag(worker, "--device") for worker in workers] == ["cuda"] * 2
    assert [flag(worker, "--gpu-memory-utilization") for worker in workers] == ["0.5"] * 2
    assert [flag(worker, "--workers-on-host") for worker in workers] == ["2"] * 2
    assert "--device" not in router.argv
    assert "--device" not in programs(Topology("smollm2"))[1].argv, "the worker's own rule decides"


def test_one_shared_worker_stands_for_both_kinds_and_has_the_machine_to_itself() -> None:
    router, worker = programs(Topology("smollm2", shared=True))
    assert (worker.name, worker.address) == ("shared-1", "127.0.0.1:50061")
    assert flag(router, "--prefill") == flag(router, "--decode") == "127.0.0.1:50061"
    assert flag(worker, "--workers-on-host") == "1"


def test_shared_does_not_go_with_several_workers() -> None:
    with pytest.raises(CommandFailed, match="--shared starts one process .* --prefill 2 --decode 1$"):
        check_ports(Topology("smollm2", shared=True, prefill=2))


def test_a_folder_named_like_our_package_in_the_working_directory_is_not_started() -> None:
    assert all("-P" in program.argv for program in programs(Topology("smollm2")))


def test_a_public_router_keeps_its_workers_on_the_loopback_address() -> None:
    router, *workers = programs(Topology("smollm2", host="0.0.0.0"))
    assert flag(router, "--host") == "0.0.0.0"
    assert router.address == "127.0.0.1:50051"
    assert {flag(worker, "--host") for worker in workers} == {"127.0.0.1"}


def test_a_taken_port_names_the_process_and_the_flag(free_ports: Callable[[int], list[int]]) -> None:
    router, prefill, decode = free_ports(3)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", decode))
        holder.listen()
        with pytest.raises(CommandFailed) as caught:
            check_ports(Topology("smollm2", port=router, prefill_port=prefill, decode_port=decode))
    sentence = str(caught.value)
    assert f"port {decode}" in sentence and f"(pid {os.getpid()})" in sentence and "--decode-port" in sentence


def test_two_processes_never_ask_for_one_port() -> None:
    with pytest.raises(CommandFailed, match="port 50061 is asked for twice, by --prefill-port and by --decode-port"):
        check_ports(Topology("smollm2", port=50051, prefill_port=50061, decode_port=50061))


async def test_a_process_that_dies_is_reported_with_its_last_words() -> None:
    deployment = Deployment(grace=1.0)
    try:
        await deployment.start(
            [script("decode-1", "import sys; sys.exit('pagewire decode: no such model')")], said=lambda *_: None
        )
        with pytest.raises(Died) as caught:
            await deployment.until_ready(lambda child: None)
    finally:
        await deployment.stop()
    assert "decode-1" in str(caught.value) and "exited with status 1" in str(caught.value)
    assert "pagewire decode: no such model" in str(caught.value)
    assert str(deployment.log_dir) in str(caught.value) and deployment.log_dir.is_dir(), "the logs of a death are kept"
    shutil.rmtree(deployment.log_dir)


async def test_logs_of_a_start_that_was_given_up_are_kept_and_quoted() -> None:
    deployment = Deployment(grace=5.0)
    try:
        await deployment.start(
            [script("router", "print('router: waiting', flush=True); import signal; signal.pause()")],
            said=lambda *_: None,
        )
        while not deployment.children[0].last_lines():
            await asyncio.sleep(0.01)
        assert "router is not ready" in deployment.why_not_ready() and "router: waiting" in deployment.why_not_ready()
        assert deployment.farewell() == "stopping", "it has served nobody"
    finally:
        await deployment.stop()
    assert deployment.log_dir.exists()
    shutil.rmtree(deployment.log_dir)


async def test_a_deployment_that_started_nothing_leaves_no_file() -> None:
    deployment = Deployment(grace=5.0)
    await deployment.stop()
    assert not deployment.log_dir.exists()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    child = await Child.start(script("prefill-1", code), tmp_path)
    while not child.last_lines():
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await child.stop(grace=0.2)
    assert time.monotonic() - began < 2
    assert child.how_it_ended() == "was killed by SIGKILL"


async def test_what_a_child_started_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
        "print(p.pid, flush=True)"
    )
    child = await Child.start(script("router", code), tmp_path)
    await child.wait()
    while not child.last_lines():
        await asyncio.sleep(0.01)
    grandchild = int(child.last_lines()[0])
    assert psutil.pid_exists(grandchild), "it outlived its parent"
    await child.stop(grace=1.0)
    gone = time.monotonic() + 2
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone
        await asyncio.sleep(0.01)


async def test_the_terminal_signal_reaches_the_supervisor_alone(tmp_path: Path) -> None:
    child = await Child.start(script("router", "import signal; signal.pause()"), tmp_path)
    try:
        assert os.getpgid(child.pid) == child.pid != os.getpgrp()
    finally:
        await child.kill()
    assert child.how_it_ended() == f"was killed by {signal.SIGKILL.name}"


async def test_what_a_child_prints_is_its_phase_and_goes_to_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    child = await Child.start(script("router", "print('router: loading weights', flush=True)"), tmp_path, said.append)
    await child.wait()
    await child.stop(grace=5.0)
    assert said == ["loading weights"]
    assert child.last_lines() == ["router: loading weights"]


async def test_a_mistake_is_found_although_what_was_said_before_it_comes_later_into_the_log(tmp_path: Path) -> None:
    code = (
        "import sys; print('pagewire prefill: --port is taken', file=sys.stderr, flush=True);"
        "print('p: running on the CPU'); sys.exit({})"
    )
    refused = await Child.start(script("prefill-1", code.format(2)), tmp_path)
    broke = await Child.start(script("prefill-2", code.format(1)), tmp_path)
    for child in (refused, broke):
        await child.wait()
        await child.stop(grace=5.0)
        assert child.last_lines() == ["pagewire prefill: --port is taken", "p: running on the CPU"]
    assert refused.mistake() == "--port is taken"
    assert not broke.mistake(), "only the exit status of a mistake makes the line one"


def test_log_lines_are_readable() -> None:
    line = '{"event": "worker_ready", "level": "info", "timestamp": "2026", "role": "decode", "blocks": 7}'
    assert readable(line) == "info: worker_ready blocks=7"
    assert readable("Killed") == "Killed"
    assert readable("7") == "7"


def test_phases_are_plain_lines_when_nobody_watches() -> None:
    out = StringIO()
    with Phases(Console(file=out, width=200)) as phases:
        phases.begin("model", "looking for smollm2")
        phases.note("model", "converting", 0.5)
        phases.end("model", "smollm2 from [here]")
    first, last = out.getvalue().splitlines()
    assert first.split(maxsplit=1) == ["model", "looking for smollm2"]
    assert last.startswith("model") and "smollm2 from [here] (0.0 s)" in last
