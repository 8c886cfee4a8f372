"""The router's settings: one frozen value, read once from the command line and the environment.

How a flag is read, from the command line or the environment, is wire.flags' business. Bad input raises BadOption, one
sentence; nothing here starts or opens anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from router.admission import RouterConfig
from router.workers import Role
from wire.flags import BadOption, Parser, add_security_flags, seconds, security_of, whole
from wire.security import Security

SAMPLING = "sampling unless a request says otherwise:"  # how the line about it begins, which `pagewire up` shows
DEFAULT_PORTS = {Role.PREFILL: 50061, Role.DECODE: 50071}


class CannotServe(Exception):
    """The model cannot be served; str() is one sentence for whoever started the router."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`names` are what clients may call the model; empty leaves that to the model. Times are seconds."""

    model: str
    names: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    metrics_compat: str | None = None  # "vllm": its names too
    generation_config: str = "auto"  # the model's own sampling defaults; "none": everybody's
    api_key: str | None = field(default=None, repr=False)  # of the HTTP port; None leaves it to the deployment's token
    targets: Sequence[tuple[Role, str]] = ()  # host:port of workers; a DNS name stands for all its addresses
    cache_dir: Path | None = None
    grace: float = 30.0
    default_deadline: float = 600.0
    max_deadline: float = 3600.0
    exit_with_parent: bool = False
    log_level: str = "info"
    core: RouterConfig = field(default_factory=RouterConfig)
    security: Security = field(default_factory=Security)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Raises BadOption. `--help` prints and exits."""
    given = _parser().read(argv, environ)
    if not given.model:
        raise BadOption("--model is missing: a directory, a .gguf file, a name in the Hugging Face cache, or smollm2")
    core = RouterConfig()
    targets = [*_targets(Role.PREFILL, given.prefill), *_targets(Role.DECODE, given.decode)]
    return Settings(
        model=given.model,
        names=tuple(_split(given.served_model_name)),
        host=given.host,
        port=given.port,
        http_port=given.http_port,
        metrics_compat=given.metrics_compat,
        generation_config=given.generation_config,
        api_key=_key(given.api_key),
        targets=tuple(dict.fromkeys(targets)),
        cache_dir=given.cache_dir,
        grace=given.grace,
        default_deadline=given.default_deadline,
        max_deadline=given.max_deadline,
        exit_with_parent=given.exit_with_parent,
        log_level=given.log_level,
        core=RouterConfig(
            max_concurrent_requests=given.max_concurrent_requests or core.max_concurrent_requests,
            max_queued_requests=_queue(given.queue, given.max_concurrent_requests, core),
            slow_client=given.slow_client,
        ),
        security=security_of(given),
    )


def _queue(given: int | None, places: int | None, core: RouterConfig) -> int:
    """Whoever says how many requests there may be means it: others wait only if that is said too."""
    if given is not None:
        return given
    return core.max_queued_requests if places is None else 0


def split_target(target: str) -> tuple[str, int]:
    """host:port, where an IPv6 address stands in brackets. Raises ValueError."""
    host, _, port = target.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"a worker is named host:port, got {target!r}")
    return host.strip("[]"), int(port)


def _parser() -> Parser:
    core = RouterConfig()
    parser = Parser("pagewire router", "Takes requests and runs them on the workers.")
    add = parser.add_argument
    add("--model", help="a directory, a .gguf file, a name in the Hugging Face cache, smollm2, or random:SHAPE")
    add("--served-model-name", action="append", help="what clients call it (repeat, or separate by commas)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=whole(0, 65535), default=50051, help="gRPC port; 0 lets the system choose (%(default)s)")
    add("--http-port", type=whole(0, 65535), default=8000, help="of OpenAI's API and /metrics (%(default)s)")
    add("--metrics-compat", choices=("vllm",), help="/metrics shows the same values under vLLM's names too")
    add(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="whether the sampling defaults of the model's generation_config.json apply (%(default)s)",
    )
    add("--api-key", help="what HTTP clients must show; better in PAGEWIRE_API_KEY (default: the deployment's token)")
    add("--prefill", action="append", metavar="HOST:PORT", help="prefill workers (repeat, or separate by commas)")
    add("--decode", action="append", metavar="HOST:PORT", help="decode workers; a name stands for all its addresses")
    add(
        "--max-concurrent-requests",
        type=whole(1, 65536),
        help=f"choices on workers at once; one more is refused, or waits with --queue ({core.max_concurrent_requests})",
    )
    add(
        "--queue",
        type=whole(0, 10**6),
        help=f"how many more may wait ({core.max_queued_requests}; none where --max-concurrent-requests is given)",
    )
    add("--slow-client", type=seconds, default=core.slow_client, help="end who reads nothing this long (%(default)s)")
    add("--default-deadline", type=seconds, default=600.0, help="seconds, where a client sets none (%(default)s)")
    add("--max-deadline", type=seconds, default=3600.0, help="seconds that a request may take (%(default)s)")
    add("--grace", type=seconds, default=30.0, help="seconds that running requests have at the end (%(default)s)")
    add("--cache-dir", type=Path, help="where converted models are kept")
    add("--exit-with-parent", action="store_true", help="end when the process that started this one ends")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add_security_flags(parser)
    return parser


def _key(key: str | None) -> str | None:
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise BadOption("--api-key must be one line of printable ASCII")
    return key


def _targets(role: Role, values: Sequence[str] | None) -> list[tuple[Role, str]]:
    named = _split(values) or [f"127.0.0.1:{DEFAULT_PORTS[role]}"]
    for target in named:
        try:
            split_target(target)
        except ValueError as error:
            raise BadOption(f"--{role.value}: {error}") from None
    return [(role, target) for target in named]


def _split(values: Sequence[str] | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]
