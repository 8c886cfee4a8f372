"""Records as the figures of `vllm bench serve`: the same keys, definitions and printed table, so that what reads those
reads these.

TTFT is from the send to the first token, TPOT (E2EL - TTFT) / (tokens - 1) of a request, ITL every gap between chunks
of all requests, E2EL from the send to the last token. Failed requests count in no figure but `failed`. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from benchmarks.serve.record import Facts, Record
from benchmarks.serve.settings import Settings

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
# Left out of a saved file unless --save-detailed asks for them, as vLLM does.
PER_REQUEST = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
WIDTH = 50


def figures(
    settings: Settings, facts: Facts, backend: str, records: Sequence[Record], seconds: float
) -> dict[str, Any]:
    good = [record for record in records if record.ok]
    total_input, total_output = (sum(getattr(record, name) for record in good) for name in ("prompt_len", "output_len"))
    limits = dict(settings.goodput)
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": facts.model,
        "tokenizer_id": None,  # the server's own
        "num_prompts": settings.num_prompts,
        "request_rate": "inf" if math.isinf(settings.request_rate) else settings.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_meets(record, limits) for record in good) / seconds if limits else None,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "input_lens": [record.prompt_len or record.job.prompt_len for record in records],
        "output_lens": [record.output_len if record.ok else 0 for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itl for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.sent for record in records],
        "queue_times": [record.sent - record.due for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
        "max_output_tokens_per_s": peak_tokens(good),
        "max_concurrent_requests": peak_requests(good),
        "rtfx": 0.0,
    }
    for name in settings.percentile_metrics:
        result.update(_distribution(name, _values(name, good), settings.percentiles))
    return result


def _meets(record: Record, limits: dict[str, float]) -> bool:
    """One token has no time per token: it counts as 0."""
    seen = {"ttft": record.ttft, "tpot": tpot(record), "e2el": record.latency}
    return all(seen[name] * 1e3 <= limit for name, limit in limits.items())


def tpot(record: Record) -> float:
    return (record.latency - record.ttft) / (record.output_len - 1) if record.output_len > 1 else 0.0


def _values(name: str, good: Sequence[Record]) -> list[float]:
    """Seconds."""
    match name:
        case "ttft":
            return [record.ttft for record in good]
        case "tpot":
            return [tpot(record) for record in good if record.output_len > 1]
        case "itl":
            return [gap for record in good for gap in record.itl]
        case "client_queue_time":
            return [record.sent - record.due for record in good]
        case "e2el_including_client_queue":
            return [record.chunk_times[-1] - record.due for record in good]
    return [record.latency for record in good]


def _distribution(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    milliseconds = np.asarray(values or [0.0]) * 1e3
    found = {
        f"mean_{name}_ms": float(np.mean(milliseconds)),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(np.std(milliseconds)),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return found


def peak_tokens(good: Sequence[Record]) -> float:
    """Most tokens in one second, counted from the first send. Where a server does not tell how many tokens a chunk
    holds, an answer's tokens are spread evenly over its chunks.
    """
    start = min((record.sent for record in good), default=0.0)
    seconds: Counter[int] = Counter()
    for record in good:
        known = sum(record.chunk_tokens) == record.output_len
        even = record.output_len / len(record.chunk_times)
        for time, tokens in zip(record.chunk_times, record.chunk_tokens, strict=True):
            seconds[int(time - start)] += tokens if known else even  # type: ignore[assignment]  # a share of a token
    return float(max(seconds.values(), default=0.0))


def peak_requests(good: Sequence[Record]) -> int:
    """Most requests open at one moment; one that ends as another starts is not open beside it."""
    changes = sorted(change for record in good for change in ((record.sent, 1), (record.chunk_times[-1], -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def failures(records: Sequence[Record]) -> list[tuple[str, int, str]]:
    """Reason, how often, and the first sentence that gave it. Most frequent first."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error:
            reason, _, sentence = record.error.partition(": ")
            counts[reason] += 1
            first.setdefault(reason, sentence)
    return [(reason, count, first[reason]) for reason, count in counts.most_common()]


# ---- the printed table --------------------------------------------------------------------------------------------


def table(settings: Settings, result: dict[str, Any], records: Sequence[Record]) -> str:
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if settings.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", settings.max_concurrency))
    if not math.isinf(settings.request_rate):
        rows.append(("Request rate configured (RPS):", settings.request_rate))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *(_row(*row) for row in rows)]
    for name in settings.percentile_metrics:
        short, title = TITLES[name]
        lines.append(f"{title:-^{WIDTH}}")
        kinds = [("mean", "Mean"), ("median", "Median"), *((f"p{one:g}", f"P{one:g}") for one in settings.percentiles)]
        lines += [_row(f"{shown} {short} (ms):", result[f"{kind}_{name}_ms"]) for kind, shown in kinds]
    lines.append("=" * WIDTH)
    if not math.isinf(settings.request_rate):
        late = np.asarray([record.released - record.due for record in records]) * 1e3
        spread = f"median {np.median(late):.2f} ms, P99 {np.percentile(late, 99):.2f} ms, most {np.max(late):.2f} ms"
        lines.append(f"Requests left later than scheduled by: {spread}")
    for reason, count, sentence in failures(records):
        lines.append(f"{count} failed with {reason}, the first: {sentence}")
    return "\n".join(lines)


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{label:<40} {value:<10}".rstrip()
