"""The flags that prefill and decode workers share, parsed once per process into one frozen value.

How a flag is read, from the command line or the environment, is wire.flags' business. Bad input raises BadOption, one
sentence; nothing here starts or opens anything.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.flags import BadOption, Parser, add_security_flags, parse_bytes, rate, seconds, security_of, share, whole
from wire.ports import at
from wire.security import Security

_WILDCARDS = ("0.0.0.0", "::")
ON_CPU = "running on the CPU"  # begins the line in which a worker says why it takes no card
TRANSPORTS = ("auto", "cuda_ipc", "memfd", "nixl", "grpc")


@dataclass(frozen=True, slots=True)
class Role:
    """What distinguishes one kind of worker from the other before anything runs."""

    name: str  # "prefill", "decode"
    service: str  # full gRPC name, which is also the health name that means ready
    port: int
    http_port: int
    max_num_seqs: int
    max_num_batched_tokens: int
    also: tuple[str, ...] = ()  # other services of the same process, ready when it is


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One worker process. `max_model_len` None takes the model's own. `advertise` is where other workers reach it."""

    role: Role
    name: str
    model: str
    cache_dir: Path | None
    host: str
    port: int
    http_port: int  # of /metrics and /health
    metrics_compat: str | None  # "vllm": its names too
    advertise: str | None
    block_size: int
    kv_memory: int | None  # bytes; None: 1 GiB on the CPU, on a card what --gpu-memory-utilization allows
    device: str
    gpu_memory_utilization: float  # of all workers on this host together
    workers_on_host: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    dtype: str
    row_tile: int | None
    threads: int
    transport: str  # how KV blocks move between workers: one of TRANSPORTS
    min_transfer_gbps: float  # below which a decode worker uses no path; GB/s, 0 takes any
    kv_digest: bool  # copied bytes are compared with their owner's digest
    grace: float  # seconds that a drain may take
    exit_with_parent: bool
    log_level: str
    security: Security

    def address(self, port: int) -> str:
        """Where other workers pull from, once `port` is bound."""
        if self.advertise:
            return self.advertise
        return at(socket.gethostname() if self.host in _WILDCARDS else self.host, port)


def parse(role: Role, argv: Sequence[str], environ: Mapping[str, str]) -> WorkerOptions:
    """Raises BadOption. `--help` prints and exits."""
    args = _parser(role).read(argv, environ)
    if not args.model:
        raise BadOption("--model is missing: a directory, a .gguf file, a name in the Hugging Face cache, or smollm2")
    cores = len(os.sched_getaffinity(0))
    return WorkerOptions(
        role=role,
        name=args.name or f"{role.name}-{args.port}",
        model=args.model,
        cache_dir=args.cache_dir,
        host=args.host,
        port=args.port,
        http_port=args.http_port,
        metrics_compat=args.metrics_compat,
        advertise=args.advertise,
        block_size=args.block_size,
        kv_memory=args.kv_memory,
        device=args.device,
        gpu_memory_utilization=args.gpu_memory_utilization,
        workers_on_host=args.workers_on_host,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        row_tile=args.row_tile,
        threads=args.threads or max(1, cores // args.workers_on_host),
        transport=args.transport,
        min_transfer_gbps=args.min_transfer_gbps,
        kv_digest=args.kv_digest == "on",
        grace=args.grace,
        exit_with_parent=args.exit_with_parent,
        log_level=args.log_level,
        security=security_of(args),
    )


def _parser(role: Role) -> Parser:
    parser = Parser(f"pagewire {role.name}", f"A {role.name} worker.")
    add = parser.add_argument
    add("--model", help="a directory, a .gguf file, a name in the Hugging Face cache, smollm2, or random:SHAPE")
    add("--cache-dir", type=Path, help="where converted models are kept (default: ~/.cache/pagewire/models)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=whole(0, 65535),
        default=role.port,
        help="gRPC port; 0 lets the system choose (default: %(default)s)",
    )
    add("--http-port", type=whole(0, 65535), default=role.http_port, help="of /metrics and /health (%(default)s)")
    add("--metrics-compat", choices=("vllm",), help="/metrics shows the same values under vLLM's names too")
    add("--advertise", metavar="HOST:PORT", help="where other workers reach this one (default: host and port)")
    add("--name", help="stable name in logs (default: role and port)")
    add("--block-size", type=int, choices=(16, 32, 64, 128), default=16, help="tokens per KV block (%(default)s)")
    add("--kv-memory", type=parse_bytes, help="for KV blocks, such as 4GiB (default: 1GiB; on a card what is left)")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a CUDA card that can be used (%(default)s)",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        help="part of the card's memory that the workers of this host may use together (%(default)s)",
    )
    add("--max-num-seqs", type=whole(1), default=role.max_num_seqs, help="sequences at a time (%(default)s)")
    add("--max-num-batched-tokens", type=whole(1), default=role.max_num_batched_tokens, help="per step (%(default)s)")
    add("--max-model-len", type=whole(1), help="prompt and output of one request (default: the model's)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: float32 on the CPU, bfloat16 on a card",
    )
    add("--row-tile", type=whole(1, 1024), help="deterministic mode: rows per linear, such as 16")
    add("--threads", type=whole(1), help="CPU threads (default: cores divided by --workers-on-host)")
    add("--workers-on-host", type=whole(1), default=1, help="workers that share this machine's cores (%(default)s)")
    add(
        "--transport",
        choices=TRANSPORTS,
        default=TRANSPORTS[0],
        help="how KV blocks move: auto takes the best way that both workers have and that a probe proves (%(default)s)",
    )
    add(
        "--min-transfer-gbps",
        type=rate,
        default=0.0,
        metavar="GB/S",
        help="a decode worker that measures less from a prefill worker pulls nothing from it (%(default)s takes any)",
    )
    add(
        "--kv-digest", choices=("on", "off"), default="on", help="compare copied bytes with their owner's (%(default)s)"
    )
    add("--grace", type=seconds, default=30.0, help="seconds that a drain may take (%(default)s)")
    add("--exit-with-parent", action="store_true", help="end when the process that started this one ends")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add_security_flags(parser)
    return parser
