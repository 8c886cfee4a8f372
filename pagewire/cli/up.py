"""`pagewire up`: prepares the model, starts router and workers, and keeps them until Ctrl-C, SIGTERM or a death.

Nothing is restarted: a process that dies is reported with its last log lines. The deployment lives on while it has
its router and a worker of each kind, else it stops. A second signal stops at once, without a drain.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from pagewire.cli.demo import answer_and_report
from pagewire.cli.deployment import Deployment, Topology, check_ports, check_security, programs
from pagewire.cli.failure import CommandFailed
from pagewire.cli.phases import Phases
from pagewire.cli.processes import Child, child_environment
from pagewire.cli.status import print_deployment
from router.config import SAMPLING
from wire.options import ON_CPU
from wire.security import Security

LOADER_LINE_BYTES = 2**20
SAME_SIGNAL_SECONDS = 0.5  # `timeout` and `make` pass on what the group already got: that is no second wish
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked for the end."""


class Signals:
    """Turns the first signal into Interrupted for whoever runs under `unless_interrupted`, later ones into `hurry`."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._first_at = 0.0
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        now = time.monotonic()
        if not self._first.is_set():
            self._first.set()
            self._first_at = now
        elif now - self._first_at > SAME_SIGNAL_SECONDS:
            self.hurry.set()

    async def unless_interrupted(self, work: Coroutine[Any, Any, None]) -> None:
        await _race(work, self._first, Interrupted())

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work came to its end."""
        try:
            await _race(work, self.hurry, Interrupted())
        except Interrupted:
            return False
        return True


async def _race(work: Coroutine[Any, Any, None], event: asyncio.Event, outcome: Exception) -> None:
    """Runs the work; when the event is set first, cancels it and raises `outcome`."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise outcome
        task.result()
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


async def up(topology: Topology, demo: str | None) -> None:
    """Returns after a signal or when the demo's answer is complete; raises CommandFailed when something broke."""
    security = check_security(topology)
    check_ports(topology)
    console = Console(highlight=False)
    signals = Signals()
    deployment = Deployment(topology.grace, security)
    try:
        await signals.unless_interrupted(_serve(topology, security, demo, deployment, console))
    except Interrupted:
        console.print(deployment.why_not_ready(), markup=False)
        console.print(f"{deployment.farewell()}, a second Ctrl-C stops at once")
    finally:
        if not await signals.unless_hurried(deployment.stop()):
            await deployment.kill()


async def _serve(
    topology: Topology, security: Security, demo: str | None, deployment: Deployment, console: Console
) -> None:
    with Phases(console) as phases:
        await prepare_model(topology, phases)
        await _start(topology, deployment, phases, None if demo else console)
    if demo is not None:
        await _with_deaths(answer_and_report(topology.address, security, demo, console), deployment)
        return
    await print_deployment(topology, security, deployment.log_dir, console)
    while True:
        death = await deployment.next_death()
        goes_on = deployment.can_serve()
        then = "the others go on" if goes_on else deployment.farewell()
        console.print(f"{death}\n{then}", markup=False, soft_wrap=True, style="yellow")
        if not goes_on:
            raise CommandFailed(f"stopped, because {death.name} ended")


async def _with_deaths(work: Coroutine[Any, Any, None], deployment: Deployment) -> None:
    """Runs the work; a death that ends the service ends it, with the dead process's last words."""
    task = asyncio.ensure_future(work)
    death = asyncio.ensure_future(deployment.next_death())
    try:
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            raise death.result()
        task.result()
    finally:
        task.cancel()
        death.cancel()
        await asyncio.gather(task, death, return_exceptions=True)


async def _start(topology: Topology, deployment: Deployment, phases: Phases, console: Console | None) -> None:
    """From then on the router's line for each ten seconds of work (wire.metrics) goes to the console too."""
    told: set[str] = set()

    def said(name: str, phase: str) -> None:
        if console and name == "router" and " running, " in phase:
            console.print(phase, markup=False, soft_wrap=True, style="dim")
        if phase.startswith(SAMPLING):
            phases.tell(name, phase)
        if phase.startswith(ON_CPU) and phase not in told:  # once for all workers
            told.add(phase)
            phases.tell("workers", phase)
        phases.note(name, phase)

    def ready(child: Child) -> None:
        phases.end(child.program.name, f"ready at {child.program.address}")

    wanted = programs(topology)
    for program in wanted:
        phases.begin(program.name, "starting")
    await deployment.start(wanted, said)
    await deployment.until_ready(ready)


async def prepare_model(topology: Topology, phases: Phases) -> Path:
    """Finds the model, and converts it once if it has to be. Its own process: torch never loads here."""
    phases.begin("model", f"looking for {topology.model}")
    argv = [sys.executable, "-P", "-m", "engine.loader", "prepare", topology.model]
    if topology.cache_dir:
        argv += ["--cache-dir", str(topology.cache_dir)]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LOADER_LINE_BYTES,
        env=child_environment(),
    )
    assert process.stdout and process.stderr, "both are pipes"
    errors = asyncio.ensure_future(process.stderr.read())
    last: dict[str, Any] = {}
    try:
        async for line in process.stdout:
            last = json.loads(line)
            if "phase" in last:
                phases.note("model", f"{topology.model}: {last['phase']}", last.get("fraction"))
        status = await process.wait()
        said = (await errors).decode("utf-8", "replace").strip()
    finally:
        if process.returncode is None:
            process.terminate()  # it takes its temporary folder away
            await process.wait()
        errors.cancel()
    if status != 0 or "dir" not in last:
        reason = last.get("error") or (said.splitlines() or [f"it exited with status {status}"])[-1]
        raise CommandFailed(f"cannot prepare the model {topology.model}: {reason}")
    phases.end("model", f"{topology.model} from {last['dir']}")
    return Path(last["dir"])
