"""Single processes of ours as a person starts them by hand, for tests: their flags, what they print, their end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import START_SECONDS

from pagewire.cli.processes import child_environment


class Started:
    """`module` is router, prefill_service or decode_service. All that it prints goes to one file."""

    def __init__(self, log: Path, module: str, *flags: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
            )

    def said(self) -> list[str]:
        """What a person reads: every line that is no structured log."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return [line for line in lines if not line.startswith("{")]

    def wait_for(self, words: str) -> str:
        """The first line with these words."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            ended = self.process.poll() is not None
            found = next((line for line in self.said() if words in line), None)
            if found is not None:
                return found
            assert not ended and time.monotonic() < deadline, self._log.read_text("utf-8", "replace")
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Its exit status and its last line, once it has ended by itself."""
        status = self.process.wait(START_SECONDS)
        return status, self.said()[-1]


@contextmanager
def started(log_dir: Path, module: str, *flags: str) -> Iterator[Started]:
    one = Started(log_dir / f"{module}-{time.monotonic_ns()}.log", module, "--http-port", "0", *flags)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
