"""What a run is asked to do, checked once. Every refusal names the flag and what fits. Opens nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.security import Security

DATASETS = ("random", "sharegpt", "prefix_repetition")
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
OBJECTIVES = ("ttft", "tpot", "e2el")


class BenchError(Exception):
    """str() is one sentence for the user. `usage` tells whether a flag is wrong, or something else."""

    def __init__(self, sentence: str, usage: bool = False) -> None:
        super().__init__(sentence)
        self.usage = usage


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and answers, by the kind of `dataset`. None: the dataset's own."""

    dataset: str = "random"
    path: Path | None = None  # of a ShareGPT JSON file
    input_len: int = 128
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 256
    suffix_len: int = 64
    num_prefixes: int = 4


@dataclass(frozen=True, slots=True)
class Settings:
    protocol: str = "grpc"
    address: str = "127.0.0.1:50051"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    security: Security = Security()
    model: str = ""
    lengths: Lengths = Lengths()
    num_prompts: int = 1000
    num_warmups: int = 0
    seed: int = 0
    request_rate: float = math.inf  # per second; inf sends everything at once
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout: float = 600.0  # seconds of one request
    ready_timeout: float = 0.0  # seconds to wait for a server that does not answer yet
    goodput: tuple[tuple[str, float], ...] = ()  # objective to milliseconds
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)

    def __post_init__(self) -> None:
        if self.protocol not in ("grpc", "http"):
            raise _refused("--protocol", f"must be grpc or http, got {self.protocol!r}")
        if not self.request_rate > 0:
            raise _refused(
                "--request-rate", f"must be above 0 (inf sends everything at once), got {self.request_rate:g}"
            )
        if not (0 < self.burstiness < math.inf):
            raise _refused("--burstiness", f"must be above 0 and finite, got {self.burstiness:g}")
        if self.lengths.dataset not in DATASETS:
            raise _refused("--dataset-name", f"must be {', '.join(DATASETS)}, got {self.lengths.dataset!r}")
        if self.lengths.path is not None and self.lengths.dataset != "sharegpt":
            raise _refused("--dataset-path", "needs --dataset-name sharegpt")
        if not 0 <= self.lengths.range_ratio < 1:
            raise _refused("--random-range-ratio", f"must be in [0, 1), got {self.lengths.range_ratio:g}")


def parse_goodput(given: Sequence[str] | None, more: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """NAME:MILLISECONDS, as `ttft:200`. `more` are the words that followed the flag's first value."""
    if more and not given:
        raise BenchError(f"{more[0]!r} belongs to no flag", usage=True)
    objectives: dict[str, float] = {}
    for pair in (*(given or ()), *(more or ())):
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not limit >= 0:
            raise _refused("--goodput", f"takes {', '.join(f'{one}:MS' for one in OBJECTIVES)}, got {pair!r}")
        objectives[name] = limit
    return tuple(objectives.items())


def parse_metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in METRICS]:
        raise _refused("--percentile-metrics", f"takes {', '.join(METRICS)}, got {unknown[0]!r}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value <= 100 for value in values):
        raise _refused("--metric-percentiles", f"takes numbers from 0 to 100, such as 50,95,99, got {text!r}")
    return values


def _refused(flag: str, sentence: str) -> BenchError:
    return BenchError(f"{flag} {sentence}", usage=True)
