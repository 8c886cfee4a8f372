"""What a deployment says of itself: the block that `up` prints, `pagewire ps` and `pagewire health`."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from engine.messages import KvPath
from pagewire.answers import ServerInfo, WorkerStatus
from pagewire.cli.deployment import Topology
from pagewire.cli.failure import CommandFailed
from pagewire.client import AsyncClient
from wire.security import Security
from wire.version import VERSION

INFO_TIMEOUT = 10.0  # seconds
_BEST_FIRST = ("local", "cuda_ipc", "memfd", "nixl", "grpc")


async def print_deployment(topology: Topology, security: Security, log_dir: Path, console: Console) -> None:
    """URLs, model, pool sizes, roles, transport, and commands to paste."""
    async with AsyncClient(topology.address, security) as client:
        info = await client.server_info(timeout=INFO_TIMEOUT)
    flags = "" if topology.address == "127.0.0.1:50051" else f" --address {topology.address}"
    if protection := replace(topology.security, insecure=False).argv():
        flags += " " + shlex.join(protection)
    command = _as_typed("pagewire")
    dtypes = ", ".join(sorted({worker.dtype for worker in info.workers}))
    lines = [
        "",
        f"pagewire {VERSION} is ready",
        f"  gRPC       {topology.address}   pagewire.v1.GenerationService, health and reflection",
        f"  HTTP       {topology.url}   OpenAI's API under /v1, /metrics, /health",
        f"  model      {topology.model}, {dtypes}",
        *(f"  {worker.role:<10} {worker.address}   {pool(worker)}" for worker in by_role(info)),
        f"  transport  {transport(info)}",
        f"  logs       {log_dir}",
        "",
        "In another terminal:",
        f"  {command} chat{flags}",
        f'  {command} generate "What is the capital of France?"{flags}',
        f"  {command} ps{flags}",
        *([] if protection else _from_python(topology)),
        "",
        "Ctrl-C stops everything.",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _from_python(topology: Topology) -> list[str]:
    return [
        f"From Python ({_as_typed('python')}):",
        "  from pagewire import Client",
        f'  print(Client("{topology.address}").generate([{{"role": "user", "content": "Hello"}}]).text)',
    ]


def _as_typed(name: str) -> str:
    """A program of this environment as another terminal in this folder can paste it."""
    here = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and Path(found) == here:
        return name
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def by_role(info: ServerInfo) -> list[WorkerStatus]:
    return sorted(info.workers, key=lambda worker: (worker.role != "prefill", worker.address))


def pool(worker: WorkerStatus) -> str:
    tokens = worker.total_blocks * worker.block_size
    return f"{worker.total_blocks:,} KV blocks x {worker.block_size} = {tokens:,} tokens"


def transport(info: ServerInfo) -> str:
    """How blocks have moved; before the first, how they will; before workers have met, the best way that all offer."""
    if paths := sorted({worker.kv_path for worker in info.workers if worker.kv_path}):
        return ", ".join(paths)
    proved = {_measured(path) for worker in info.workers for path in worker.kv_paths if path.transport}
    if proved:
        return ", ".join(sorted(proved))
    common = [kind for kind in _BEST_FIRST if all(kind in worker.transports for worker in info.workers)]
    return common[0] if common and info.workers else "none"


def _measured(path: KvPath) -> str:
    words = f"{path.transport}, {path.bytes_per_second / 1e9:.2f} GB/s from {path.owner}"
    return f"{words} ({path.fallback})" if path.fallback else words


async def ps(address: str, security: Security, *, as_json: bool) -> None:
    async with AsyncClient(address, security) as client:
        info = await client.server_info(timeout=INFO_TIMEOUT)
    if as_json:
        print(json.dumps(asdict(info), indent=2))
        return
    rows = [("ROLE", "ADDRESS", "STATE", "RUNNING", "WAITING", "KV BLOCKS IN USE", "LEASED", "PULLED", "KV PATH")]
    rows += [
        (
            worker.role,
            worker.address,
            "accepting" if worker.accepting else "not used",
            str(worker.running),
            str(worker.waiting),
            f"{worker.total_blocks - worker.free_blocks:,} of {worker.total_blocks:,}",
            f"{worker.leased_blocks:,}",
            f"{worker.pulled_blocks:,}",
            worker.kv_path or " or ".join(worker.transports),
        )
        for worker in by_role(info)
    ]
    print(f"router {address}, version {info.version}, up {info.uptime:.0f} s")
    print(table(rows) if info.workers else "no worker is connected")
    for worker in by_role(info):
        for path in worker.kv_paths:
            print(f"{worker.role} {worker.address} {moved(path)}")
        if worker.reason:
            print(f"{worker.role} {worker.address} {worker.reason}")


def moved(path: KvPath) -> str:
    """One path in words, with what went through it."""
    if not path.transfers and not path.failures:
        return str(path)
    failed = ", ".join(f"{count:,} failed: {reason}" for reason, count in sorted(path.failures.items()))
    counts = f"{path.transfers:,} pulls, {path.bytes:,} bytes"
    return f"{path}; {counts}, {failed}" if failed else f"{path}; {counts}"


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


async def health(address: str, security: Security, service: str, timeout: float) -> None:
    """Prints one word, or raises CommandFailed: not ready, or nobody there."""
    from wire.channel import open_channel
    from wire.health import is_ready

    channel = open_channel(address, security, internal=False)
    try:
        ready, alive = await asyncio.gather(is_ready(channel, service, timeout), is_ready(channel, "", timeout))
    finally:
        await channel.close()
    if not ready:
        state = f"is alive, but {service} is not ready" if alive else "does not answer"
        raise CommandFailed(f"{address} {state}")
    print("ready" if service else "alive")
