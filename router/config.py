"""The router's settings: one frozen value, read once from the command line and the environment.

Every flag can be given as an environment variable too: --max-deadline is PAGEWIRE_MAX_DEADLINE. A flag wins. Bad
input raises BadSetting, one sentence; nothing here starts or opens anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from router.admission import RouterConfig
from router.workers import Role
from wire.security import InsecureAddress, Security

DEFAULT_PORTS = {Role.PREFILL: 50061, Role.DECODE: 50071}


class BadSetting(ValueError):
    """A flag or its environment variable is wrong; str() is one sentence that names it."""


class CannotServe(Exception):
    """The model cannot be served; str() is one sentence for whoever started the router."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`names` are what clients may call the model; empty leaves that to the model. Times are seconds."""

    model: str
    names: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 50051
    targets: Sequence[tuple[Role, str]] = ()  # host:port of workers; a DNS name stands for all its addresses
    cache_dir: Path | None = None
    grace: float = 30.0
    default_deadline: float = 600.0
    max_deadline: float = 3600.0
    exit_with_parent: bool = False
    log_level: str = "info"
    core: RouterConfig = field(default_factory=RouterConfig)
    security: Security = field(default_factory=Security)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadSetting(message)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Raises BadSetting. `--help` prints and exits."""
    parser = _parser()
    given = parser.parse_args([*_from_environment(parser, argv, environ), *argv])
    if not given.model:
        raise BadSetting("--model is missing: a directory, a .gguf file, a name in the Hugging Face cache, or smollm2")
    try:
        security = Security(_token(given.token_file), given.tls_cert, given.tls_key, given.tls_ca, given.insecure)
    except InsecureAddress as error:
        raise BadSetting(str(error)) from None
    targets = [*_targets(Role.PREFILL, given.prefill), *_targets(Role.DECODE, given.decode)]
    return Settings(
        model=given.model,
        names=tuple(_split(given.served_model_name)),
        host=given.host,
        port=given.port,
        targets=tuple(dict.fromkeys(targets)),
        cache_dir=given.cache_dir,
        grace=given.grace,
        default_deadline=given.default_deadline,
        max_deadline=given.max_deadline,
        exit_with_parent=given.exit_with_parent,
        log_level=given.log_level,
        core=RouterConfig(max_concurrent_requests=given.max_concurrent_requests, max_queued_requests=given.queue),
        security=security,
    )


def split_target(target: str) -> tuple[str, int]:
    """host:port, where an IPv6 address stands in brackets. Raises ValueError."""
    host, _, port = target.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"a worker is named host:port, got {target!r}")
    return host.strip("[]"), int(port)


def _parser() -> _Parser:
    core = RouterConfig()
    parser = _Parser("pagewire router", description="Takes requests and runs them on the workers.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", help="a directory, a .gguf file, a name in the Hugging Face cache, smollm2, or random:SHAPE")
    add("--served-model-name", action="append", help="what clients call it (repeat, or separate by commas)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_whole(0, 65535), default=50051, help="gRPC port; 0 lets the system choose (%(default)s)")
    add("--prefill", action="append", metavar="HOST:PORT", help="prefill workers (repeat, or separate by commas)")
    add("--decode", action="append", metavar="HOST:PORT", help="decode workers; a name stands for all its addresses")
    add("--max-concurrent-requests", type=_whole(1, 65536), default=core.max_concurrent_requests)
    add("--queue", type=_whole(0, 10**6), default=core.max_queued_requests, help="how many more may wait")
    add("--default-deadline", type=_seconds, default=600.0, help="seconds, where a client sets none (%(default)s)")
    add("--max-deadline", type=_seconds, default=3600.0, help="seconds that a request may take (%(default)s)")
    add("--grace", type=_seconds, default=30.0, help="seconds that running requests have at the end (%(default)s)")
    add("--cache-dir", type=Path, help="where converted models are kept")
    add("--exit-with-parent", action="store_true", help="end when the process that started this one ends")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--token-file", type=Path, help="file with the deployment's token")
    add("--tls-cert", type=Path, help="PEM file of this router's certificate")
    add("--tls-key", type=Path, help="PEM file of its key")
    add("--tls-ca", type=Path, help="PEM file of the authority that signed all certificates")
    add("--insecure", action="store_true", help="listen on a public address with neither mTLS nor a token")
    return parser


def _from_environment(parser: _Parser, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The variables of the flags that are not given, as flags."""
    found: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        value = environ.get("PAGEWIRE_" + flag.lstrip("-").replace("-", "_").upper())
        if value is None or flag == "--help" or any(part.split("=")[0] == flag for part in argv):
            continue
        if action.nargs != 0:
            found += [flag, value]
        elif value.lower() in ("1", "true", "yes"):
            found.append(flag)
    return found


def _targets(role: Role, values: Sequence[str] | None) -> list[tuple[Role, str]]:
    named = _split(values) or [f"127.0.0.1:{DEFAULT_PORTS[role]}"]
    for target in named:
        try:
            split_target(target)
        except ValueError as error:
            raise BadSetting(f"--{role.value}: {error}") from None
    return [(role, target) for target in named]


def _split(values: Sequence[str] | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--token-file {file} cannot be read: {error}") from None
    if not token:
        raise BadSetting(f"--token-file {file} is empty")
    return token


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number in [{low}, {high}], got {text!r}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds in [0, 86400], got {text!r}")
    return value
