"""`pagewire bench`: the group of commands that measure. Each takes flags and hands them to a module of benchmarks/.

Nothing of benchmarks/ or engine/ is imported before its command runs, so that --help answers at once. Measures nothing
itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagewire.cli import bench_flags as flags
from pagewire.cli.flags import (
    DEFAULT_ADDRESS,
    ENVIRONMENT,
    Address,
    ApiKey,
    Config,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    read_security,
)

bench = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure a running server (serve), the kernels, the KV transfer, or the engine offline.",
)


@bench.command(context_settings=ENVIRONMENT)
def serve(
    objectives: flags.MoreObjectives = None,
    protocol: flags.Protocol = "grpc",
    address: Address = DEFAULT_ADDRESS,
    base_url: flags.BaseUrl = "http://127.0.0.1:8000",
    endpoint: flags.Endpoint = "/v1/completions",
    model: flags.Model = "",
    num_prompts: flags.NumPrompts = 1000,
    request_rate: flags.RequestRate = float("inf"),
    burstiness: flags.Burstiness = 1.0,
    max_concurrency: flags.MaxConcurrency = None,
    num_warmups: flags.NumWarmups = 0,
    seed: flags.LoadSeed = 0,
    timeout: flags.Timeout = 600.0,
    ready_check_timeout_sec: flags.ReadyTimeout = 0.0,
    dataset_name: flags.DatasetName = "random",
    dataset_path: flags.DatasetPath = None,
    input_len: flags.InputLen = 128,
    output_len: flags.OutputLen = None,
    random_range_ratio: flags.RangeRatio = 0.0,
    prefix_len: flags.PrefixLen = 256,
    suffix_len: flags.SuffixLen = 64,
    num_prefixes: flags.NumPrefixes = 4,
    ignore_eos: flags.IgnoreEos = None,
    temperature: flags.LoadTemperature = 0.0,
    goodput: flags.Goodput = None,
    percentile_metrics: flags.PercentileMetrics = "ttft,tpot,itl",
    metric_percentiles: flags.MetricPercentiles = "99",
    save_result: flags.SaveResult = False,
    save_detailed: flags.SaveDetailed = False,
    result_dir: flags.ResultDir = None,
    result_filename: flags.ResultFilename = None,
    plot: flags.Plot = None,
    api_key: ApiKey = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
) -> None:
    """Put load on a running server and print what `vllm bench serve` prints. Exits with 1 if any request failed."""
    from pagewire.cli.bench_serve import Output, refusals
    from pagewire.cli.bench_serve import serve as run_serve

    with refusals():
        from benchmarks.serve import settings as given

        lengths = given.Lengths(
            dataset=dataset_name, path=dataset_path, input_len=input_len, output_len=output_len,
            range_ratio=random_range_ratio, prefix_len=prefix_len,
            suffix_len=suffix_len, num_prefixes=num_prefixes,
        )  # fmt: skip
        settings = given.Settings(
            protocol=protocol, address=address, base_url=base_url, endpoint=endpoint, api_key=api_key,
            security=read_security(token_file, tls_cert, tls_key, tls_ca), model=model, lengths=lengths,
            num_prompts=num_prompts, num_warmups=num_warmups, seed=seed, request_rate=request_rate,
            burstiness=burstiness, max_concurrency=max_concurrency,
            ignore_eos=dataset_name != "sharegpt" if ignore_eos is None else ignore_eos, temperature=temperature,
            timeout=timeout, ready_timeout=ready_check_timeout_sec,
            goodput=given.parse_goodput(goodput, objectives),
            percentile_metrics=given.parse_metrics(percentile_metrics),
            percentiles=given.parse_percentiles(metric_percentiles),
        )  # fmt: skip
        run_serve(settings, Output(save_result, save_detailed, result_dir, result_filename, plot))


@bench.command()
def kernels(
    parts: Annotated[
        list[str] | None, typer.Argument(help="attention, products, layers, sampling, small; or all.")
    ] = None,
    json_dir: Annotated[Path | None, typer.Option(help="Keep the figures there as JSON.")] = None,
) -> None:
    """Time the CUDA kernels beside their floors and peers. Needs a card."""
    from pagewire.cli.bench_local import kernels as run_kernels

    run_kernels(parts or [], json_dir)


@bench.command()
def kv(
    size: Annotated[str, typer.Option(metavar="BYTES", help="Moved in one round.")] = "64MiB",
    block: Annotated[str, typer.Option(metavar="BYTES", help="Of one KV block.")] = "2MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a path and its raw peer in turn.")] = 15,
    path: Annotated[
        list[str] | None, typer.Option(help="memfd, nixl, grpc, cuda_ipc (default: all there are).")
    ] = None,
    json_dir: Annotated[Path | None, typer.Option(help="Keep the figures there as JSON.")] = None,
) -> None:
    """GB/s and hand-over latency of every way that KV blocks can take on this machine, the raw path beside ours."""
    from pagewire.cli.bench_local import kv as run_kv

    run_kv(["--size", size, "--block", block, "--rounds", str(rounds)], path or [], json_dir)


@bench.command(context_settings=ENVIRONMENT)
def offline(
    model: Annotated[str, typer.Option(help="As for `pagewire up`.")] = "smollm2",
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cpu).")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads (default: all cores).")] = None,
    kv_memory: Annotated[str | None, typer.Option(metavar="BYTES", help="KV pool, such as 512MiB.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt tokens in one step.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where converted models are kept.")] = None,
    num_prompts: flags.NumPrompts = 32,
    seed: flags.LoadSeed = 0,
    dataset_name: flags.DatasetName = "random",
    input_len: flags.InputLen = 128,
    output_len: flags.OutputLen = None,
    random_range_ratio: flags.RangeRatio = 0.0,
    output_json: Annotated[Path | None, typer.Option(help="Write the figures there.")] = None,
    config: Config = None,
) -> None:
    """Run a batch through the engine in this process: requests/s and tokens/s, as `vllm bench throughput`."""
    from pagewire.cli.bench_local import offline as run_offline
    from pagewire.cli.bench_serve import refusals

    with refusals():
        from benchmarks.serve.settings import Lengths, Settings

        lengths = Lengths(
            dataset=dataset_name, input_len=input_len, output_len=output_len, range_ratio=random_range_ratio
        )
        settings = Settings(lengths=lengths, num_prompts=num_prompts, seed=seed)
        engine = {
            "model": model, "device": device, "dtype": dtype, "threads": threads, "kv_cache_memory_bytes": kv_memory,
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "download_dir": cache_dir,
        }  # fmt: skip
        run_offline(settings, output_json, engine)
