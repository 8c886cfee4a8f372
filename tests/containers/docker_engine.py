"""A Docker engine for the tests: the one that runs, or one that is started for them and leaves nothing behind.

Owns the daemon, its folder, and what it did to the machine's packet filter. Cannot is the answer where no engine can
run here, with the reason; everything else that goes wrong raises.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
}
START_S = 60.0
STOP_S = 30.0
_KEY = Path("/etc/docker/key.json")  # an old daemon makes one
_TABLES = ("filter", "nat")


class Cannot(Exception):
    """No container can be run on this machine; str() says why."""


class Docker:
    """What the tests type, at the daemon of `host`; None is this machine's own, which goes on after the tests.

    Both programs are those of the distribution where it has them.
    """

    def __init__(self, host: str | None) -> None:
        self.ends_with_tests = host is not None
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}
        self.environment["PATH"] = f"/usr/bin:{self.environment['PATH']}"  # a client and a daemon of one age
        if host is not None:
            self.environment["DOCKER_HOST"] = host

    def __call__(self, *arguments: str, timeout: float = 120.0) -> str:
        """What `docker ARGUMENTS` printed. Raises with both outputs if it failed."""
        return self.run(["docker", *arguments], timeout=timeout)

    def run(
        self, command: Sequence[str], *, timeout: float = 120.0, cwd: Path | None = None, also: Mapping[str, str] = {}
    ) -> str:
        ran = subprocess.run(
            command,
            env={**self.environment, **also},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if ran.returncode != 0:
            raise AssertionError(
                f"{' '.join(command)} exited with {ran.returncode}\n{ran.stdout}\n{ran.stderr}"[-8000:]
            )
        return ran.stdout

    def load_base(self, folder: Path, tag: str) -> None:
        """A folder becomes an image, without any registry."""
        with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(
                ["docker", "import", "-", tag],
                env=self.environment,
                stdin=tar.stdout,
                stdout=subprocess.DEVNULL,
                timeout=120,
                check=True,
            )
        assert tar.returncode == 0, "tar could not read the base system"


@contextmanager
def docker_engine() -> Iterator[Docker]:
    """Raises Cannot."""
    _install()
    if _answers(Docker(None)):
        yield Docker(None)
        return
    folder = Path(tempfile.mkdtemp(prefix="pagewire-docker-"))
    key_was_there, rules = _KEY.exists(), {table: _rules(table) for table in _TABLES}
    try:
        with _daemon(folder) as docker:
            yield docker
    finally:
        for table, before in rules.items():
            _restore(table, before)
        if not key_was_there:
            _KEY.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _install() -> None:
    """What is missing, by apt: these are no Python packages."""
    if os.geteuid() != 0:
        raise Cannot("a Docker engine needs root")
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Cannot(f"{', '.join(sorted(set(missing)))} are not installed, and there is no apt-get to install them")
    apt = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # the package must start no service
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "iptables", *sorted(set(missing))]):
        ran = subprocess.run(["apt-get", "-qq", *command], env=apt, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise Cannot(f"apt-get {' '.join(command)} failed: {ran.stderr.strip() or ran.stdout.strip()}"[-800:])


@contextmanager
def _daemon(folder: Path) -> Iterator[Docker]:
    docker = Docker(f"unix://{folder}/socket")
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "dockerd",
                f"--host=unix://{folder}/socket",
                f"--data-root={folder}/data",
                f"--exec-root={folder}/exec",
                f"--pidfile={folder}/pid",
                "--bridge=none",
                "--storage-driver=overlay2",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(docker):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Cannot("dockerd does not start here: " + " | ".join(log.read_text().splitlines()[-3:]))
            time.sleep(0.2)
        yield docker
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its containers, its containerd and its mounts
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(docker: Docker) -> bool:
    ran = subprocess.run(["docker", "info"], env=docker.environment, capture_output=True, timeout=30, check=False)
    return ran.returncode == 0 and b"Server Version" in ran.stdout


# ---- the packet filter --------------------------------------------------------------------------------------------


def _rules(table: str) -> str:
    saved = subprocess.run(["iptables-save", "-t", table], capture_output=True, text=True, check=False)
    return saved.stdout if saved.returncode == 0 else ""


def _restore(table: str, before: str) -> None:
    """As it was; a table that nobody had used is empty and lets everything pass again."""
    if not before:
        chains = (
            ("INPUT", "FORWARD", "OUTPUT") if table == "filter" else ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")
        )
        before = "\n".join([f"*{table}", *(f":{chain} ACCEPT [0:0]" for chain in chains), "COMMIT\n"])
    subprocess.run(["iptables-restore"], input=before, text=True, capture_output=True, check=False)
