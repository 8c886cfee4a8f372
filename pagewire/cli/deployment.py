"""A router and its workers on this host: which processes, on which ports, and their life from start to drain.

`programs` is pure. Deployment starts them, tells when all are ready or one has died, and stops them in order:
the router drains first, then the workers, so that running requests can finish.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.cli.failure import CommandFailed
from pagewire.cli.processes import Child, Program
from wire.flags import BadOption, SecurityFlags
from wire.ports import PortTaken, at, check_free
from wire.security import InsecureAddress, Security

ROUTER_SERVICE = "pagewire.v1.GenerationService"
WORKER_SERVICES = {
    "prefill": "pagewire.v1.PrefillService",
    "decode": "pagewire.v1.DecodeService",
    "shared": "pagewire.v1.DecodeService",  # ready when its other one is
}
MODULES = {"prefill": "prefill_service", "decode": "decode_service", "shared": "shared_service"}
STAGES = ("prefill", "decode")
WORKER_HOST = "127.0.0.1"  # workers talk to this host's router and to each other only
EXIT_SECONDS = 5.0  # beyond the grace, for a process to end by itself before it is killed
HEALTH_INTERVAL = 0.1  # seconds between two looks at a process that is not ready yet


@dataclass(frozen=True, slots=True)
class Topology:
    """What `pagewire up` was asked for. None leaves a value to the worker's own default."""

    model: str
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    prefill: int = 1
    decode: int = 1
    shared: bool = False  # one process has both stages, at the first prefill worker's ports
    prefill_port: int = 50061
    decode_port: int = 50071
    prefill_http_port: int = 8061  # of /metrics; the n-th worker of a kind adds n - 1
    decode_http_port: int = 8071
    metrics_compat: str | None = None
    generation_config: str | None = None
    threads: int | None = None
    kv_memory: str | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    device: str | None = None
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    row_tile: int | None = None
    transport: str | None = None
    min_transfer_gbps: float | None = None
    kv_digest: str | None = None
    cache_dir: Path | None = None
    grace: float = 30.0  # seconds that running requests have when it stops
    security: SecurityFlags = field(default_factory=SecurityFlags)

    @property
    def client_host(self) -> str:
        """The router's host, as a client on this machine names it."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def address(self) -> str:
        """Where a client on this machine reaches the router."""
        return at(self.client_host, self.port)

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the router by HTTP."""
        return f"http{'s' if self.security.tls_cert else ''}://{at(self.client_host, self.http_port)}"

    def workers(self) -> Iterator[tuple[str, int, int, int]]:
        """(role, number from 1, port, HTTP port): the n-th worker of a kind adds n - 1 to its kind's ports."""
        if self.shared:
            yield "shared", 1, self.prefill_port, self.prefill_http_port
            return
        for role, count, first, first_http in (
            ("prefill", self.prefill, self.prefill_port, self.prefill_http_port),
            ("decode", self.decode, self.decode_port, self.decode_http_port),
        ):
            for number in range(1, count + 1):
                yield role, number, first + number - 1, first_http + number - 1


def programs(topology: Topology) -> list[Program]:
    """The router first, then the workers."""
    python = (sys.executable, "-P", "-m")
    addresses: dict[str, list[str]] = {stage: [] for stage in STAGES}
    workers = []
    for role, number, port, http_port in topology.workers():
        address = f"{WORKER_HOST}:{port}"
        for stage in STAGES if role == "shared" else (role,):
            addresses[stage].append(address)
        argv = (*python, MODULES[role], "--host", WORKER_HOST, "--port", str(port), *worker_flags(topology))
        argv += ("--http-port", str(http_port))
        workers.append(Program(f"{role}-{number}", role, argv, address, WORKER_SERVICES[role]))
    argv = (*python, "router", "--host", topology.host, "--port", str(topology.port), *_model_flags(topology))
    argv += ("--http-port", str(topology.http_port))
    if topology.generation_config is not None:
        argv += ("--generation-config", topology.generation_config)
    for role, known in addresses.items():
        argv += (f"--{role}", ",".join(known))
    return [Program("router", "router", argv, topology.address, ROUTER_SERVICE), *workers]


def _model_flags(topology: Topology) -> tuple[str, ...]:
    cache = ("--cache-dir", str(topology.cache_dir)) if topology.cache_dir else ()
    compat = ("--metrics-compat", topology.metrics_compat) if topology.metrics_compat else ()
    shared = ("--model", topology.model, "--grace", f"{topology.grace:g}", "--exit-with-parent")
    return (*shared, *cache, *compat, *topology.security.argv())


def worker_flags(topology: Topology) -> tuple[str, ...]:
    values = {
        "--threads": topology.threads,
        "--kv-memory": topology.kv_memory,
        "--block-size": topology.block_size,
        "--max-num-seqs": topology.max_num_seqs,
        "--max-num-batched-tokens": topology.max_num_batched_tokens,
        "--max-model-len": topology.max_model_len,
        "--device": topology.device,
        "--gpu-memory-utilization": topology.gpu_memory_utilization,
        "--dtype": topology.dtype,
        "--row-tile": topology.row_tile,
        "--transport": topology.transport,
        "--min-transfer-gbps": topology.min_transfer_gbps,
        "--kv-digest": topology.kv_digest,
    }
    given = [part for flag, value in values.items() if value is not None for part in (flag, str(value))]
    count = len(list(topology.workers()))
    return (*_model_flags(topology), "--workers-on-host", str(count), *given)


def check_security(topology: Topology) -> Security:
    """What a client on this machine needs. Raises CommandFailed where a process would refuse to listen."""
    try:
        security = topology.security.read()
        security.check_host(topology.host)
        for name in dict.fromkeys((WORKER_HOST, topology.client_host)):
            security.check_files(name)
    except (BadOption, InsecureAddress) as error:
        raise CommandFailed(str(error), exit_code=2) from None
    return security


def check_ports(topology: Topology) -> None:
    """Raises CommandFailed naming the first taken port, who holds it, and the flag that chooses another."""
    if topology.shared and (topology.prefill, topology.decode) != (1, 1):
        said = f"--prefill {topology.prefill} --decode {topology.decode}"
        raise CommandFailed(f"--shared starts one process for both stages: it does not go with {said}", exit_code=2)
    wanted = [("--port", topology.host, topology.port)]
    for role, _, port, http_port in topology.workers():
        role = "prefill" if role == "shared" else role  # the flags that choose its ports
        wanted += [(f"--{role}-port", WORKER_HOST, port), (f"--{role}-http-port", WORKER_HOST, http_port)]
    wanted.append(("--http-port", topology.host, topology.http_port))
    seen: dict[int, str] = {}
    for flag, host, port in wanted:
        if not 1 <= port <= 65535:
            raise CommandFailed(f"{flag} must be in [1, 65535], got {port}")
        if port in seen:
            raise CommandFailed(f"port {port} is asked for twice, by {seen[port]} and by {flag}")
        seen[port] = flag
        try:
            check_free(host, port)
        except PortTaken as error:
            raise CommandFailed(str(error).replace("--port", flag)) from None


class Died(CommandFailed):
    """A process of the deployment ended by itself: by a mistake of the user, which it names, or by an accident."""

    def __init__(self, child: Child) -> None:
        self.name = child.program.name
        self.mistake = child.mistake()
        accident = f"{child.program.name} (pid {child.pid}) {child.how_it_ended()}{child.last_words()}"
        super().__init__(f"{child.program.name}: {self.mistake}" if self.mistake else accident)


class Deployment:
    """The processes that were started. The caller awaits `stop` whatever happens, also when `start` was interrupted.

    Logs are kept only if a process ended by itself, or if not all became ready.
    """

    def __init__(self, grace: float, security: Security | None = None) -> None:
        self._security = security or Security()
        self.log_dir = Path(tempfile.mkdtemp(prefix="pagewire-"))
        self.children: list[Child] = []
        self._grace = grace
        self._keep_logs = True
        self._dead: set[Child] = set()
        self._ready_ones: set[Child] = set()

    async def start(self, wanted: list[Program], said: Callable[[str, str], None]) -> None:
        """`said` gets (process name, phase) whenever one of them says what it does."""
        for program in wanted:
            self.children.append(await Child.start(program, self.log_dir, partial(said, program.name)))

    async def until_ready(self, on_ready: Callable[[Child], None]) -> None:
        """Returns when every process says that it is ready; raises Died if one ends before."""
        death = asyncio.ensure_future(self.next_death())
        ready = asyncio.gather(*(self._ready(child, on_ready) for child in self.children))
        both: set[asyncio.Future[Any]] = {death, ready}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise death.result()
            await ready
            self._keep_logs = False
        finally:
            death.cancel()
            ready.cancel()
            await asyncio.gather(death, ready, return_exceptions=True)

    def why_not_ready(self) -> str:
        """The last words of those that are not ready, for a user who gave up waiting."""
        return "".join(
            f"\n{child.program.name} is not ready{child.last_words()}"
            for child in self.children
            if child not in self._ready_ones
        )

    async def next_death(self) -> Died:
        """Waits until a process that was running ends by itself."""
        waits = {asyncio.ensure_future(child.wait()): child for child in self.children if child not in self._dead}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        child = waits[done.pop()]
        self._dead.add(child)
        await child.kill()
        died = Died(child)
        self._keep_logs = not died.mistake
        return died

    def can_serve(self) -> bool:
        """The router and at least one worker for each stage are running."""
        roles = {child.program.role for child in self.children if child.running}
        return "router" in roles and ("shared" in roles or roles.issuperset(STAGES))

    def farewell(self) -> str:
        """What is said when it stops: whether somebody may still be served."""
        roles = {child.program.role for child in self._ready_ones if child.running}
        return f"stopping: requests have {self._grace:g} s to finish" if "router" in roles else "stopping"

    async def stop(self) -> None:
        """Drains: the router first, then all workers at once. Nothing is left when it returns."""
        for stage in (("router",), tuple(MODULES)):
            children = [child for child in self.children if child.program.role in stage]
            await asyncio.gather(*(child.stop(self._grace + EXIT_SECONDS) for child in children))
        self._remove_logs()

    async def kill(self) -> None:
        """Stops at once, without a drain."""
        await asyncio.gather(*(child.kill() for child in self.children))
        self._remove_logs()

    def _remove_logs(self) -> None:
        if not self._keep_logs or not self.children:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def _ready(self, child: Child, on_ready: Callable[[Child], None]) -> None:
        from wire.channel import open_channel
        from wire.health import is_ready

        channel = open_channel(child.program.address, self._security, internal=False)
        try:
            while not await is_ready(channel, child.program.service, timeout=1.0):
                await asyncio.sleep(HEALTH_INTERVAL)
        finally:
            await channel.close()
        self._ready_ones.add(child)
        on_ready(child)
