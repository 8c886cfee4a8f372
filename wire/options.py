"""The flags that prefill and decode workers share, parsed once per process into one frozen value.

Every flag can be given as an environment variable too: --kv-memory is PAGEWIRE_KV_MEMORY. A flag wins. Bad input
raises BadOption, one sentence; nothing here starts or opens anything.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from wire.security import InsecureAddress, Security

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_WILDCARDS = ("0.0.0.0", "::")


class BadOption(ValueError):
    """A flag or its environment variable is wrong; str() is one sentence that names it."""


@dataclass(frozen=True, slots=True)
class Role:
    """What distinguishes one kind of worker from the other before anything runs."""

    name: str  # "prefill", "decode"
    service: str  # full gRPC name, which is also the health name that means ready
    port: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One worker process. `max_model_len` None takes the model's own. `advertise` is where other workers reach it."""

    role: Role
    name: str
    model: str
    cache_dir: Path | None
    host: str
    port: int
    advertise: str | None
    block_size: int
    kv_memory: int  # bytes
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    dtype: str
    row_tile: int | None
    threads: int
    grace: float  # seconds that a drain may take
    exit_with_parent: bool
    log_level: str
    security: Security

    def address(self, port: int) -> str:
        """Where other workers pull from, once `port` is bound."""
        if self.advertise:
            return self.advertise
        host = socket.gethostname() if self.host in _WILDCARDS else self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadOption(message)


def parse(role: Role, argv: Sequence[str], environ: Mapping[str, str]) -> WorkerOptions:
    """Raises BadOption. `--help` prints and exits."""
    parser = _parser(role)
    args = parser.parse_args([*_from_environment(parser, environ), *argv])
    if args.model is None:
        raise BadOption("--model is missing: a directory, a .gguf file, a name in the Hugging Face cache, or smollm2")
    try:
        security = Security(_token(args.token_file), args.tls_cert, args.tls_key, args.tls_ca, args.insecure)
    except InsecureAddress as error:
        raise BadOption(str(error)) from None
    cores = len(os.sched_getaffinity(0))
    return WorkerOptions(
        role=role,
        name=args.name or f"{role.name}-{args.port}",
        model=args.model,
        cache_dir=args.cache_dir,
        host=args.host,
        port=args.port,
        advertise=args.advertise,
        block_size=args.block_size,
        kv_memory=args.kv_memory,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        row_tile=args.row_tile,
        threads=args.threads or max(1, cores // args.workers_on_host),
        grace=args.grace,
        exit_with_parent=args.exit_with_parent,
        log_level=args.log_level,
        security=security,
    )


def _parser(role: Role) -> _Parser:
    parser = _Parser(f"pagewire {role.name}", description=f"A {role.name} worker.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", help="a directory, a .gguf file, a name in the Hugging Face cache, smollm2, or random:SHAPE")
    add("--cache-dir", type=Path, help="where converted models are kept (default: ~/.cache/pagewire/models)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=role.port, help="gRPC port; 0 lets the system choose (default: %(default)s)")
    add("--advertise", metavar="HOST:PORT", help="where other workers reach this one (default: host and port)")
    add("--name", help="stable name in logs (default: role and port)")
    add("--block-size", type=int, choices=(16, 32, 64, 128), default=16, help="tokens per KV block (%(default)s)")
    add("--kv-memory", type=parse_bytes, default=2**30, help="memory for KV blocks, such as 4GiB (default: 1GiB)")
    add("--max-num-seqs", type=_positive, default=role.max_num_seqs, help="sequences at a time (%(default)s)")
    add("--max-num-batched-tokens", type=_positive, default=role.max_num_batched_tokens, help="per step (%(default)s)")
    add("--max-model-len", type=_positive, help="prompt and output of one request (default: the model's)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto: float32 on the CPU")
    add("--row-tile", type=_positive, help="deterministic mode: rows per linear, such as 16")
    add("--threads", type=_positive, help="CPU threads (default: cores divided by --workers-on-host)")
    add("--workers-on-host", type=_positive, default=1, help="workers that share this machine's cores (%(default)s)")
    add("--grace", type=_seconds, default=30.0, help="seconds that a drain may take (%(default)s)")
    add("--exit-with-parent", action="store_true", help="end when the process that started this one ends")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--token-file", type=Path, help="file with the deployment's token")
    add("--tls-cert", type=Path, help="PEM file of this worker's certificate")
    add("--tls-key", type=Path, help="PEM file of its key")
    add("--tls-ca", type=Path, help="PEM file of the authority that signed all certificates")
    add("--insecure", action="store_true", help="listen on a public address with neither mTLS nor a token")
    return parser


def _from_environment(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """The variables as flags, to stand before the real ones: a later flag wins."""
    found: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        value = environ.get("PAGEWIRE_" + flag.lstrip("-").replace("-", "_").upper())
        if value is None or flag == "--help":
            continue
        if action.nargs != 0:
            found += [flag, value]
        elif value.lower() in ("1", "true", "yes"):
            found.append(flag)
    return found


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"--token-file {file} cannot be read: {error}") from None
    if not token:
        raise BadOption(f"--token-file {file} is empty")
    return token


def parse_bytes(text: str) -> int:
    """`1GiB`, `512MiB`, `2G`, or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory such as 4GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _port(text: str) -> int:
    return _number(text, 0, 65535)


def _positive(text: str) -> int:
    return _number(text, 1, 2**31 - 1)


def _number(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be a whole number in [{low}, {high}], got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds in [0, 86400], got {text!r}")
    return value
