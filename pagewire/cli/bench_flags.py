"""The types of the flags of `pagewire bench serve`, with their help. The names are those of `vllm bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LOAD, PROMPTS, RESULTS = "Load", "Prompts", "Results"  # panels of --help

# `--goodput ttft:200 tpot:50`: what follows the first one arrives as arguments.
MoreObjectives = Annotated[list[str] | None, typer.Argument(hidden=True)]

Protocol = Annotated[str, typer.Option(help="grpc (Pagewire's), or http (OpenAI's, of any server).")]
BaseUrl = Annotated[str, typer.Option(help="The HTTP server's.")]
Endpoint = Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")]
Model = Annotated[str, typer.Option(help="As the server calls it (default: its first).")]
ReadyTimeout = Annotated[float, typer.Option(min=0, help="Wait so many seconds for a server that is not there yet.")]

NumPrompts = Annotated[int, typer.Option(min=1, help="How many requests.", rich_help_panel=LOAD)]
RequestRate = Annotated[float, typer.Option(help="Requests per second; inf sends all at once.", rich_help_panel=LOAD)]
Burstiness = Annotated[float, typer.Option(help="1 is a Poisson process, more is more even.", rich_help_panel=LOAD)]
MaxConcurrency = Annotated[
    int | None, typer.Option(min=1, help="Most requests open at once; the others wait here.", rich_help_panel=LOAD)
]
NumWarmups = Annotated[int, typer.Option(min=0, help="Requests before, in no figure.", rich_help_panel=LOAD)]
LoadSeed = Annotated[int, typer.Option(help="Of prompts and send times.", rich_help_panel=LOAD)]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.", rich_help_panel=LOAD)]

DatasetName = Annotated[str, typer.Option(help="random, sharegpt or prefix_repetition.", rich_help_panel=PROMPTS)]
DatasetPath = Annotated[
    Path | None,
    typer.Option(help="A ShareGPT JSON file; without it sharegpt draws its lengths.", rich_help_panel=PROMPTS),
]
InputLen = Annotated[
    int,
    typer.Option("--input-len", "--random-input-len", min=1, help="Tokens of a prompt.", rich_help_panel=PROMPTS),
]
OutputLen = Annotated[
    int | None,
    typer.Option(
        "--output-len", "--random-output-len", "--sharegpt-output-len", "--prefix-repetition-output-len",
        min=1, help="Tokens of an answer (default: 32; sharegpt: its own).", rich_help_panel=PROMPTS,
    ),
]  # fmt: skip
RangeRatio = Annotated[float, typer.Option(help="Lengths of random vary by this share.", rich_help_panel=PROMPTS)]
PrefixLen = Annotated[
    int,
    typer.Option(
        "--prefix-len",
        "--prefix-repetition-prefix-len",
        min=1,
        help="Tokens that prompts share.",
        rich_help_panel=PROMPTS,
    ),
]
SuffixLen = Annotated[
    int,
    typer.Option(
        "--suffix-len",
        "--prefix-repetition-suffix-len",
        min=1,
        help="Tokens that each has of its own.",
        rich_help_panel=PROMPTS,
    ),
]
NumPrefixes = Annotated[
    int,
    typer.Option(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        min=1,
        help="How many different beginnings.",
        rich_help_panel=PROMPTS,
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Default: yes, sharegpt no.", rich_help_panel=PROMPTS),
]
LoadTemperature = Annotated[
    float, typer.Option(min=0.0, max=10.0, help="0 always takes the likeliest token.", rich_help_panel=PROMPTS)
]

Goodput = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:MS ...", help="Such as ttft:200 tpot:50 e2el:2000.", rich_help_panel=RESULTS),
]
PercentileMetrics = Annotated[
    str,
    typer.Option(
        help="Of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue.", rich_help_panel=RESULTS
    ),
]
MetricPercentiles = Annotated[str, typer.Option(help="Such as 50,95,99.", rich_help_panel=RESULTS)]
SaveResult = Annotated[bool, typer.Option("--save-result", help="Write a JSON file.", rich_help_panel=RESULTS)]
SaveDetailed = Annotated[
    bool, typer.Option("--save-detailed", help="With each request's own figures.", rich_help_panel=RESULTS)
]
ResultDir = Annotated[Path | None, typer.Option(help="Where the file goes (default: here).", rich_help_panel=RESULTS)]
ResultFilename = Annotated[
    str | None, typer.Option(help="Its name (default: one with the date).", rich_help_panel=RESULTS)
]
Plot = Annotated[Path | None, typer.Option(help="Draw the run: .png, .svg or .pdf.", rich_help_panel=RESULTS)]
