"""One child process of `pagewire up`: started in a group of its own, logged to a file, stopped without a trace.

The child dies with this process (--exit-with-parent), also when this one is killed by SIGKILL. Being in its own
group it does not see the terminal's Ctrl-C: only `stop` ends it, in the order that a drain needs, and a stop takes
the whole group, so that nothing that a child started survives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 12
TAIL_BYTES = 65_536
MAX_LINE_BYTES = 2**20
USER_MISTAKE = 2  # the exit status of our processes when a flag, a model or a port is wrong


@dataclass(frozen=True, slots=True)
class Program:
    """What to start. `service` is the gRPC service whose health says that it is ready."""

    name: str  # "router", "prefill-1"
    role: str  # "router", "prefill", "decode"
    argv: Sequence[str]
    address: str  # host:port
    service: str


class Child:
    """A started Program. `wait` may be awaited by several; `stop` is safe to call at any time, also twice.

    What it prints on stdout is for people: one phase per line. All of it, and stderr, goes to its log.
    """

    def __init__(self, program: Program, process: asyncio.subprocess.Process, log: Path) -> None:
        self.program = program
        self.log = log
        self._process = process
        self._group_ended = False  # its number may belong to somebody else from then on
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, program: Program, log_dir: Path, said: Callable[[str], None] = lambda line: None) -> Child:
        """Appends to log_dir/NAME.log; `said` gets every line of its stdout, without the name in front."""
        log = log_dir / f"{program.name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=child_environment(),
                limit=MAX_LINE_BYTES,
            )
        child = cls(program, process, log)
        child._reading = asyncio.create_task(child._read(said))
        return child

    async def _read(self, said: Callable[[str], None]) -> None:
        assert self._process.stdout, "it is a pipe"
        with self.log.open("ab", buffering=0) as output:
            async for line in self._process.stdout:
                output.write(line)
                said(line.decode("utf-8", "replace").strip().partition(": ")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, grace: float) -> None:
        """SIGTERM and up to `grace` seconds to drain, then SIGKILL for the whole group."""
        if self.running:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL for the whole group; also what must follow a child's own end, for what it may have started."""
        if not self._group_ended:
            self._group_ended = True
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        if self._reading:
            await self._reading  # ends with the group: nobody else holds the pipe

    def how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def mistake(self) -> str:
        """The sentence with which it refused what the user asked for; empty if it ended in any other way.

        It need not be the last line: stderr goes straight to the log, and what stdout said before comes by a pipe.
        """
        if self._process.returncode != USER_MISTAKE:
            return ""
        said = f"pagewire {self.program.role}: "
        sentences = [line.removeprefix(said) for line in self.last_lines() if line.startswith(said)]
        return sentences[-1] if sentences else ""

    def last_words(self) -> str:
        """To stand after what is said of it."""
        lines = "".join(f"\n  {line}" for line in self.last_lines())
        return f"; its last lines, of {self.log}:{lines}" if lines else " and printed nothing"

    def last_lines(self) -> list[str]:
        """The end of its log, JSON lines made readable."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        return [readable(line) for line in text.splitlines() if line.strip()][-LAST_LINES:]


def child_environment() -> dict[str, str]:
    """This process's, with our packages first on the path: `python -P -m router` then never finds another `router`.

    Without the file of flags that was this command's.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name != "PAGEWIRE_CONFIG"}
    return {**inherited, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def readable(line: str) -> str:
    """A structured log line as `level event key=value ...`; any other line unchanged."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    hidden = {"event", "level", "timestamp", "role", "component", "exception"}  # the traceback stays in the file
    facts = " ".join(f"{name}={value}" for name, value in record.items() if name not in hidden)
    return f"{record.get('level', 'info')}: {record['event']} {facts}".rstrip()
