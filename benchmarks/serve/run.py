"""A run from its settings to its records: the prompts, the clock, and a task for each request.

Send times are absolute, so that a late one delays no other; how late the clock itself was is kept with each record.
Collects and shows; judges nothing and computes no figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import time
from collections.abc import Sequence

from benchmarks.serve.arrivals import send_times
from benchmarks.serve.grpc_target import GrpcTarget
from benchmarks.serve.http_target import HttpTarget
from benchmarks.serve.lengths import (
    LONGEST_SUM,
    TEXT,
    Job,
    Material,
    fits,
    make_jobs,
    repeated,
    sharegpt_pairs,
)
from benchmarks.serve.progress import Progress
from benchmarks.serve.record import Facts, Record, Target
from benchmarks.serve.settings import BenchError, Settings

TOKENIZING_AT_ONCE = 16


async def run(settings: Settings) -> tuple[Facts, str, list[Record], float]:
    """The server's facts, the target's name, the records in the order of their sending, and the seconds it took."""
    target: Target = GrpcTarget(settings) if settings.protocol == "grpc" else HttpTarget(settings)
    try:
        facts = await _ready(target, settings)
        jobs = await prepare(target, settings, facts)
        if settings.num_warmups:
            warmups = [jobs[number % len(jobs)] for number in range(settings.num_warmups)]
            failed = [record for record in (await drive(target, settings, warmups, None))[0] if record.error]
            if failed:
                raise BenchError(f"a warm-up request failed: {failed[0].error}")
        times = send_times(len(jobs), settings.request_rate, settings.burstiness, random.Random(settings.seed))
        records, seconds = await drive(target, settings, jobs, times)
        return facts, target.backend, records, seconds
    finally:
        await target.close()


async def _ready(target: Target, settings: Settings) -> Facts:
    deadline = time.monotonic() + settings.ready_timeout
    while True:
        try:
            return await target.facts()
        except BenchError as error:
            if error.usage or time.monotonic() >= deadline:
                raise
        await asyncio.sleep(1)


# ---- prompts ------------------------------------------------------------------------------------------------------


async def prepare(target: Target, settings: Settings, facts: Facts) -> Sequence[Job]:
    rng = random.Random(settings.seed)
    if settings.lengths.path is not None:
        return await _file_jobs(target, settings, facts, rng)
    ids = await target.tokenize(TEXT)
    return make_jobs(settings, Material(sorted(set(ids or ()))), facts.max_model_len, rng)


async def _file_jobs(target: Target, settings: Settings, facts: Facts, rng: random.Random) -> list[Job]:
    """Conversations that pass vLLM's filter, counted by the server's tokenizer."""
    path, given = settings.lengths.path, settings.lengths.output_len
    assert path is not None, "only called with one"
    in_all = min(LONGEST_SUM, facts.max_model_len or LONGEST_SUM)
    jobs: list[Job] = []
    pairs = sharegpt_pairs(path, rng)
    for start in range(0, len(pairs), TOKENIZING_AT_ONCE):
        if len(jobs) >= settings.num_prompts:
            break
        texts = [text for pair in pairs[start : start + TOKENIZING_AT_ONCE] for text in pair]
        found = await asyncio.gather(*map(target.tokenize, texts))
        counts = [len(tokens) for tokens in found if tokens is not None]
        if len(counts) < len(texts):
            raise BenchError("--dataset-path needs a server with /tokenize and --endpoint /v1/completions", usage=True)
        for text, prompt_len, answer_len in zip(texts[::2], counts[::2], counts[1::2], strict=True):
            output_len = given or answer_len
            if fits(prompt_len, output_len, in_all):
                jobs.append(Job(text, prompt_len, output_len))
    return repeated(
        jobs,
        settings.num_prompts,
        lambda: BenchError(f"no conversation of {path} fits into {in_all} tokens", usage=True),
    )


# ---- the clock ----------------------------------------------------------------------------------------------------


async def drive(
    target: Target, settings: Settings, jobs: Sequence[Job], times: Sequence[float] | None
) -> tuple[list[Record], float]:
    """Without `times`: a warm-up, all at once and not shown."""
    limit = settings.max_concurrency
    gate: contextlib.AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
    )
    records = [Record(job) for job in jobs]
    tasks: list[asyncio.Task[None]] = []

    with Progress(len(jobs) if times is not None else 0, sys.stderr) as progress:

        async def one(record: Record) -> None:
            async with gate:
                await target.send(record)
            progress.done(record)

        gc.collect()
        gc.freeze()  # prompts never die: the collector must not look at them while the clock runs
        began = time.perf_counter()
        try:
            for record, offset in zip(records, times or [0.0] * len(records), strict=True):
                record.due = began + offset
                if (wait := record.due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                record.released = time.perf_counter()
                tasks.append(asyncio.create_task(one(record)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            gc.unfreeze()
    return records, time.perf_counter() - began
