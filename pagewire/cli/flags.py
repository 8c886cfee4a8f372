"""The types of the flags that several commands share, with their help. Knows no command and loads nothing of ours.

A flag that is not given is looked up in PAGEWIRE_*, by ENVIRONMENT, then in the file of --config: for all of them, as
the processes do it (wire.flags). A shell that is set up once needs none of the security flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wire.security import Security

ENVIRONMENT = {"auto_envvar_prefix": "PAGEWIRE"}  # a command's context: --kv-memory is PAGEWIRE_KV_MEMORY
DEFAULT_ADDRESS = "127.0.0.1:50051"
SECURITY = "Security"  # the panel of these flags in --help


def _from_file(context: typer.Context, file: Path | None) -> Path | None:
    """Values of flags that neither the command line nor the environment has."""
    if file is None or context.resilient_parsing:
        return file
    from pagewire.cli.failure import CommandFailed
    from wire.config_file import read_config_file
    from wire.flags import BadOption, word

    options = {each.name: each for each in context.command.params if each.param_type_name == "option" and each.name}
    try:
        values = read_config_file(file, options.keys() - {"config"})
    except BadOption as error:
        raise CommandFailed(str(error), exit_code=2) from None
    context.default_map = {
        name: value if getattr(options[name], "is_flag", False) or isinstance(value, list) else word(value)
        for name, value in values.items()
    }
    return file


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        callback=_from_file,
        help="YAML file of flags, such as `kv-memory: 4GiB`; the command line and PAGEWIRE_* win.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Address = Annotated[str, typer.Option(help="The router's gRPC address, host:port.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens (default: as many as fit).")]
Temperature = Annotated[float, typer.Option(min=0.0, max=10.0, help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this total mass.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.")]

Device = Annotated[
    str | None, typer.Option(help="auto, cpu or cuda (default: auto, a CUDA card if there is one that can be used).")
]
GpuMemoryUtilization = Annotated[
    float | None, typer.Option(help="Part of the card's memory that all workers may use together (default: 0.9).")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads per worker (default: cores / workers).")]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES", help="KV pool of each worker, such as 512MiB (default: 1GiB; on a card what is left)."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16 or float16 (default: auto, float32 on the CPU).")
]
MetricsCompat = Annotated[str | None, typer.Option(help="vllm: /metrics has the same values by vLLM's names too.")]
GenerationConfig = Annotated[
    str | None, typer.Option(help="none leaves out the sampling defaults of generation_config.json (default: auto).")
]
RowTile = Annotated[int | None, typer.Option(min=1, max=1024, help="Deterministic mode: rows per linear, such as 16.")]

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="PAGEWIRE_API_KEY",
        help="What HTTP clients must show (default: the deployment's token, if any).",
        rich_help_panel=SECURITY,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="PAGEWIRE_TOKEN_FILE", help="File with the deployment's token.", rich_help_panel=SECURITY),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="PAGEWIRE_TLS_CERT", help="PEM file of the certificate to show.", rich_help_panel=SECURITY),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="PAGEWIRE_TLS_KEY", help="PEM file of its key.", rich_help_panel=SECURITY)
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="PAGEWIRE_TLS_CA",
        help="PEM file of the authority that signed all certificates.",
        rich_help_panel=SECURITY,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="PAGEWIRE_INSECURE",
        help="Listen on a public address with neither mTLS nor a token.",
        rich_help_panel=SECURITY,
    ),
]


def read_security(
    token_file: Path | None, tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None
) -> Security:
    """What a command that connects may show, from the files that its flags name. Raises CommandFailed."""
    from pagewire.cli.failure import CommandFailed
    from wire.flags import BadOption, SecurityFlags

    try:
        return SecurityFlags(token_file, tls_cert, tls_key, tls_ca).read()
    except BadOption as error:
        raise CommandFailed(str(error), exit_code=2) from None
