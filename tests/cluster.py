"""A router and workers as real processes, for tests: started, killed and restarted one by one.

Uses the programs of `pagewire up` but not its supervision, so that a test decides what dies and when.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.cli.deployment import Topology, programs
from pagewire.cli.processes import Program, child_environment, readable
from wire.ports import is_free

SHARED_CLUSTERS = pytest.StashKey[list["Cluster"]]()  # those that outlive a test
START_SECONDS = 60.0  # two cores, and other tests beside


class Cluster:
    """`address` is the router's. Processes are named router, prefill-1, decode-1, ..."""

    def __init__(self, topology: Topology, log_dir: Path) -> None:
        self.topology = topology
        self.address = topology.address
        self.programs: dict[str, Program] = {program.name: program for program in programs(topology)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log_dir = log_dir

    def start(self, *names: str) -> None:
        """Starts these, or all. Does not wait."""
        for name in names or self.programs:
            with self._log(name).open("ab") as output:
                self.processes[name] = subprocess.Popen(
                    self.programs[name].argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=child_environment(),
                )

    def wait_ready(self, *names: str, seconds: float = START_SECONDS) -> None:
        """Until these, or all, say that they are ready."""
        deadline = time.monotonic() + seconds
        for name in names or self.programs:
            while not self.ready(name):
                for other in self.processes:
                    assert self.alive(other), f"{other} ended before {name} was ready:\n{self.log(other)}"
                assert time.monotonic() < deadline, f"{name} was not ready in {seconds} s:\n{self.log(name)}"
                time.sleep(0.05)

    def ready(self, name: str, service: str | None = None) -> bool:
        """`service` "" asks whether it is alive; None asks for the service that the process is there for."""
        program = self.programs[name]
        request = health_pb2.HealthCheckRequest(service=program.service if service is None else service)
        with grpc.insecure_channel(program.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def alive(self, name: str) -> bool:
        return self.processes[name].poll() is None

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """kill -9, and waits until it is gone."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str, seconds: float = 30.0) -> int:
        """SIGTERM, and its exit status."""
        self.processes[name].terminate()
        return self.processes[name].wait(seconds)

    def restore(self) -> None:
        """Every process runs again and is ready, whatever was done to it."""
        for name in self.programs:
            if not self.alive(name) or not self.ready(name):
                self.kill(name)
                self.start(name)
        self.wait_ready()

    def log(self, name: str) -> str:
        return "\n".join(readable(line) for line in self.written(name).splitlines()[-40:])

    def written(self, name: str) -> str:
        """All that it has printed and logged."""
        return self._log(name).read_text("utf-8", "replace")

    def tracebacks(self, name: str) -> list[str]:
        """Lines of its whole log that tell of an exception which nobody expected."""
        return [
            line
            for line in self.written(name).splitlines()
            if "Traceback" in line or "exception was never retrieved" in line
        ]

    def pids(self) -> set[int]:
        return {process.pid for process in self.processes.values()}

    def kill_all(self) -> None:
        for name in self.processes:
            self.kill(name)

    def _log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


def free_run(count: int) -> int:
    """The first of `count` consecutive ports on 127.0.0.1 that nothing listens on, below the system's own range."""
    for _ in range(1000):
        first = random.randrange(20_000, 32_000 - count)
        if all(is_free("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise AssertionError(f"no {count} consecutive free ports")


def make_topology(**options: Any) -> Topology:
    """Options are Topology's fields; the model is random:tiny and the ports are free unless given."""
    prefill, decode = options.setdefault("prefill", 1), options.setdefault("decode", 1)
    first = free_run(2 + 2 * (prefill + decode))
    ports = {"port": first, "prefill_port": first + 1, "decode_port": first + 1 + prefill}
    ports["http_port"] = http = first + 1 + prefill + decode
    ports |= {"prefill_http_port": http + 1, "decode_http_port": http + 1 + prefill}
    return Topology(**{"model": "random:tiny", "kv_memory": "16MiB", **ports, **options})


@contextmanager
def running_cluster(log_dir: Path, *, start: bool = True, **options: Any) -> Iterator[Cluster]:
    """A cluster that is ready, or yet to be started; every process of it is gone afterwards."""
    cluster = Cluster(make_topology(**options), log_dir)
    try:
        if start:
            cluster.start()
            cluster.wait_ready()
        yield cluster
    finally:
        cluster.kill_all()
