"""Throughput of the engine in this process, no server and no network: what `vllm bench throughput` measures.

    pagewire bench offline --model smollm2 --num-prompts 32

All prompts are handed over at once, as a batch job would; the clock runs from there to the last answer. The model is
loaded and has answered once before.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.serve.lengths import TEXT, Material, make_jobs
from benchmarks.serve.settings import Settings
from engine.types import SamplingParams
from pagewire.llm import LLM


@dataclass(frozen=True, slots=True)
class Throughput:
    """The keys of `as_json` are those that vLLM writes."""

    elapsed_time: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def as_json(self) -> dict[str, float]:
        tokens = self.prompt_tokens + self.output_tokens
        return {
            "elapsed_time": self.elapsed_time,
            "num_requests": self.num_requests,
            "total_num_tokens": tokens,
            "requests_per_second": self.num_requests / self.elapsed_time,
            "tokens_per_second": tokens / self.elapsed_time,
        }

    def __str__(self) -> str:
        tokens = self.prompt_tokens + self.output_tokens
        return (
            f"Throughput: {self.num_requests / self.elapsed_time:.2f} requests/s, "
            f"{tokens / self.elapsed_time:.2f} total tokens/s, "
            f"{self.output_tokens / self.elapsed_time:.2f} output tokens/s\n"
            f"Total num prompt tokens:  {self.prompt_tokens}\n"
            f"Total num output tokens:  {self.output_tokens}"
        )


def measure(settings: Settings, *, progress: bool, **engine: Any) -> Throughput:
    """`engine` are EngineArgs' arguments. Raises PagewireError and BenchError."""
    with LLM(**engine) as llm:
        warm = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        material = Material(sorted(set(warm[0].prompt_token_ids or ())))
        jobs = make_jobs(settings, material, None, random.Random(settings.seed))
        params = [
            SamplingParams(temperature=settings.temperature, max_tokens=job.output_len, ignore_eos=settings.ignore_eos)
            for job in jobs
        ]
        prompts = [job.prompt for job in jobs]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=progress)
        seconds = time.perf_counter() - began
    return Throughput(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids or ()) for output in outputs),
        sum(len(output.outputs[0].token_ids) for output in outputs),
    )
