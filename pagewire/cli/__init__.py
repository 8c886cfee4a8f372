"""The `pagewire` command: what a user types. `main` is its entry point.

Every command imports what it needs inside its function, so that --help answers at once. A command that fails says
one sentence on stderr and exits with a status other than 0; nobody sees a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli.bench import bench
from pagewire.cli.failure import CommandFailed
from pagewire.cli.flags import (
    DEFAULT_ADDRESS,
    ENVIRONMENT,
    Address,
    ApiKey,
    Config,
    Device,
    Dtype,
    GenerationConfig,
    GpuMemoryUtilization,
    Insecure,
    Json,
    KvMemory,
    MaxTokens,
    MetricsCompat,
    RowTile,
    Seed,
    Temperature,
    Threads,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    TopP,
    read_security,
)

# One line per paragraph: typer wraps them to the terminal.
HELP = "\n\n".join(
    (
        "Serve a language model with separate prefill and decode workers that exchange paged KV blocks by id.",
        "`pagewire up` starts a router and its workers on this machine. In another terminal, `pagewire chat` and "
        '`pagewire generate "..."` talk to them, `pagewire ps` lists the workers and `pagewire health` says whether '
        "they are ready. Ctrl-C ends `up`: requests that run may finish first.",
        "For several hosts, `pagewire router`, `pagewire prefill` and `pagewire decode` start one process each. "
        "`pagewire doctor` says what is wrong with a machine or a deployment, `pagewire bench` measures.",
        "A flag that is not given is looked up in the environment (--kv-memory is PAGEWIRE_KV_MEMORY), then in the "
        "YAML file that --config names.",
    )
)

app = typer.Typer(
    name="pagewire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=HELP,
)
app.add_typer(bench, name="bench")


@app.command(context_settings=ENVIRONMENT)
def up(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A directory, a .gguf file, a name in the Hugging Face cache, smollm2, or random:SHAPE.")
    ] = "smollm2",
    prefill: Annotated[int, typer.Option(min=1, help="How many prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="How many decode workers.")] = 1,
    shared: Annotated[
        bool, typer.Option("--shared", help="One process has both stages, one copy of the weights and one KV pool.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where the router listens; workers stay on 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The router's gRPC port.")] = 50051,
    http_port: Annotated[int, typer.Option(help="The router's HTTP port: OpenAI's API and /metrics.")] = 8000,
    api_key: ApiKey = None,
    prefill_port: Annotated[int, typer.Option(help="Of the first prefill worker; the n-th adds n - 1.")] = 50061,
    decode_port: Annotated[int, typer.Option(help="Of the first decode worker; the n-th adds n - 1.")] = 50071,
    prefill_http_port: Annotated[int, typer.Option(help="/metrics of the first prefill worker.")] = 8061,
    decode_http_port: Annotated[int, typer.Option(help="/metrics of the first decode worker.")] = 8071,
    metrics_compat: MetricsCompat = None,
    generation_config: GenerationConfig = None,
    threads: Threads = None,
    kv_memory: KvMemory = None,
    device: Device = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV block: 16, 32, 64 or 128 (default: 16).")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt tokens in one step.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output of one request (default: the model's).")
    ] = None,
    dtype: Dtype = None,
    row_tile: RowTile = None,
    transport: Annotated[
        str | None, typer.Option(help="How KV blocks move: auto, cuda_ipc, memfd, nixl or grpc (default: auto).")
    ] = None,
    min_transfer_gbps: Annotated[
        float | None, typer.Option(min=0, metavar="GB/S", help="Use no path that measures less (default: any).")
    ] = None,
    kv_digest: Annotated[str | None, typer.Option(help="on or off: compare copied bytes with their owner's.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where converted models are kept.")] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that requests have to finish at the end.")
    ] = 30.0,
    demo: Annotated[
        str | None, typer.Option(metavar="PROMPT", help="Answer this prompt, print what it took, and stop.")
    ] = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    insecure: Insecure = False,
    config: Config = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print where each setting comes from and the memory plan; start nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
) -> None:
    """Start a router, prefill workers and decode workers on this machine, and keep them until Ctrl-C."""
    import os
    from dataclasses import fields

    # Before grpc loads, here and in every child: it is never used across a fork, and would complain about each.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if api_key is not None:  # the router reads it there: everybody on this machine can see a command line
        os.environ["PAGEWIRE_API_KEY"] = api_key
    from pagewire.cli.deployment import Topology
    from pagewire.cli.up import up as run_up
    from wire.flags import SecurityFlags

    flags = {each.name: context.params[each.name] for each in fields(Topology) if each.name != "security"}
    topology = Topology(**flags, security=SecurityFlags(token_file, tls_cert, tls_key, tls_ca, insecure))
    if dry_run:
        from pagewire.cli.plan import dry_run as run_dry

        _run(run_dry(topology, _sources(context), json))
    else:
        _run(run_up(topology, demo))


@app.command(context_settings=ENVIRONMENT)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, it is read from standard input.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print token counts and times to stderr at the end.")] = False,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
) -> None:
    """Answer one prompt, from the argument or from standard input, and stream the text to standard output."""
    from pagewire.cli.ask import generate as run_generate

    text = _standard_input() if prompt in (None, "-") else prompt
    sampling = _sampling(max_tokens, temperature, top_p, seed)
    with _sentences():
        security = read_security(token_file, tls_cert, tls_key, tls_ca)
        run_generate(address, security, text, sampling, raw=raw, stats=stats)


@app.command(context_settings=ENVIRONMENT)
def chat(
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str | None, typer.Option(help="A system message before the first turn.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
) -> None:
    """Talk with the model over several turns; /help lists what else can be typed."""
    from pagewire.cli.ask import chat as run_chat

    with _sentences():
        security = read_security(token_file, tls_cert, tls_key, tls_ca)
        run_chat(address, security, system, _sampling(max_tokens, temperature, top_p, seed))


@app.command(context_settings=ENVIRONMENT)
def ps(
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """List the workers that the router knows, with their KV blocks."""
    from pagewire.cli.status import ps as run_ps

    _run(run_ps(address, read_security(token_file, tls_cert, tls_key, tls_ca), as_json=json))


@app.command(context_settings=ENVIRONMENT)
def health(
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[
        str, typer.Option(help="The gRPC service that must be ready; empty asks only whether the process is alive.")
    ] = "pagewire.v1.GenerationService",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer.")] = 2.0,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
) -> None:
    """Exit with status 0 if the server is ready, else 1: for container and service managers."""
    from pagewire.cli.status import health as run_health

    _run(run_health(address, read_security(token_file, tls_cert, tls_key, tls_ca), service, timeout))


PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command("router", context_settings=PASSED_ON)
def router_process(context: typer.Context) -> None:
    """Run a router by itself, on this host; `pagewire router --help` lists its flags."""
    from router.__main__ import main as run_router

    sys.exit(run_router(context.args))


@app.command("prefill", context_settings=PASSED_ON)
def prefill_process(context: typer.Context) -> None:
    """Run one prefill worker by itself; `pagewire prefill --help` lists its flags."""
    from prefill_service.__main__ import main as run_prefill
    from wire.worker import leave

    leave(run_prefill(context.args))


@app.command("decode", context_settings=PASSED_ON)
def decode_process(context: typer.Context) -> None:
    """Run one decode worker by itself; `pagewire decode --help` lists its flags."""
    from decode_service.__main__ import main as run_decode
    from wire.worker import leave

    leave(run_decode(context.args))


@app.command("compile")
def compile_kernels(
    model: Annotated[str, typer.Option(help="As for `pagewire up`.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block: 16, 32, 64 or 128.")] = 16,
    arch: Annotated[list[str] | None, typer.Option(help="sm_80 or sm_90a (Hopper); both unless named.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where compiled kernels are kept.")] = None,
    model_cache_dir: Annotated[
        Path | None, typer.Option(envvar="PAGEWIRE_CACHE_DIR", help="Where converted models are kept.")
    ] = None,
) -> None:
    """Compile a model's CUDA kernels ahead of time. Needs nvcc and no GPU; copy the folder to where no nvcc is."""
    from pagewire.cli.kernels import compile_for

    for line in compile_for(model, dtype, block_size, arch or ["sm_80", "sm_90a"], cache_dir, model_cache_dir):
        typer.echo(line)


@app.command(context_settings=ENVIRONMENT)
def doctor(
    address: Address = DEFAULT_ADDRESS,
    cache_dir: Annotated[Path | None, typer.Option(help="Where converted models are kept.")] = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Look at this machine and at the deployment, and say what is wrong and how it is mended."""
    from pagewire.cli.doctor import doctor as run_doctor

    _run(run_doctor(address, read_security(token_file, tls_cert, tls_key, tls_ca), cache_dir, as_json=json))


@app.command()
def version() -> None:
    """Print the version."""
    from wire.version import VERSION

    typer.echo(VERSION)


def _sources(context: typer.Context) -> dict[str, tuple[object, str]]:
    """Each flag's value and where it comes from; secrets are not shown."""
    named = {"ENVIRONMENT": "environment", "COMMANDLINE": "command line", "DEFAULT_MAP": str(context.params["config"])}
    found: dict[str, tuple[object, str]] = {}
    for name in (each.name for each in context.command.params):
        source = context.get_parameter_source(name) if name else None
        if name and source is not None and name not in ("config", "dry_run", "json", "demo"):
            value = context.params[name]
            shown = "(hidden)" if name == "api_key" and value else value
            default = "default" if value is not None else "left to the process"
            found[f"--{name.replace('_', '-')}"] = (shown, named.get(source.name, default))
    return found


def _sampling(max_tokens: int | None, temperature: float, top_p: float, seed: int | None) -> Any:
    from engine.types import InvalidField, SamplingParams

    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    except InvalidField as error:
        raise CommandFailed(str(error), exit_code=2) from None


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"standard input is not UTF-8: {error.reason} at byte {error.start}", exit_code=2) from None


def _run(work: Coroutine[Any, Any, None]) -> None:
    import asyncio

    with _sentences():
        asyncio.run(work)


@contextmanager
def _sentences() -> Iterator[None]:
    """What the client says is what the user reads."""
    from pagewire.answers import PagewireError

    try:
        yield
    except PagewireError as error:
        raise CommandFailed(str(error)) from None


def main() -> None:
    try:
        app(prog_name="pagewire")
    except CommandFailed as failure:
        typer.echo(f"pagewire: {failure}", err=True)
        sys.exit(failure.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        sys.stderr.close()
        sys.exit(141)
