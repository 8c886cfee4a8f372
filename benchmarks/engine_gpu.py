"""The engine on a card: decode steps, prefill and an offline run, each beside its floor and vLLM's figure.

    python -m benchmarks.engine_gpu --json benchmarks/results/engine_gpu.json [--plot steps.svg]

A step is (time at which all sequences have 193 tokens - time at which all have 65) / 128, through scheduler and runner,
with 1,024-token prompts, while all of them run. Weights are random and made on the card. The floor of a step is
(weights + KV) at the speed at which an H200 reads, 4.57 TB/s; vLLM 0.24's figures are (time of 193 tokens - time of 65
tokens) / 128, on an H200. The gap between two steps is from the end of the last kernel of one to the beginning of the
first of the next, by the card's clock; once while all run, and once as a decode stage whose requests join and leave.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import plots
from benchmarks.decode_stage import DecodeStage
from engine.backend.cuda import Gpu
from engine.config import EngineConfig, ModelConfig
from engine.cuda_cache import CudaKVCache
from engine.cuda_runner import CudaRunner
from engine.kv_cache import kv_layout
from engine.loader.random_shapes import SHAPES
from engine.models.llama import Llama
from engine.types import SamplingParams
from pagewire.local_engine import LocalEngine
from wire.garbage import spare_collections

READ = 4.57e12  # bytes a second
PROMPT = 1024
LONG, SHORT = 193, 65
AHEAD = 16  # prompts added before each step
OFFLINE = 512  # prompts
JOINING = 128  # requests that run while others join and leave
SHORT_OUTPUTS = (16, 112)  # tokens of those, at least and at most: about two join and two leave in each step
BATCHES = (1, 8, 32, 64, 128, 256)
VLLM_STEPS_MS = {
    "llama3-8b": {1: 4.970, 8: 5.305, 32: 6.347, 64: 7.881, 128: 10.957, 256: 18.317},
    "smollm2-135m": {1: 1.484, 8: 1.861, 32: 1.768, 64: 3.853, 128: 4.337, 256: 2.481},
}
VLLM_PREFILL = {"llama3-8b": 43300.0}  # tokens a second
VLLM_OFFLINE_S = {"llama3-8b": 16.76, "smollm2-135m": 2.75}


def tensors_of(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights in bfloat16, on the card, scaled so that activations keep their size."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, inputs**-0.5)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", ones()
        yield f"{layer}.post_attention_layernorm.weight", ones()
        yield f"{layer}.self_attn.q_proj.weight", matrix(config.num_heads * dim, hidden)
        yield f"{layer}.self_attn.k_proj.weight", matrix(config.num_kv_heads * dim, hidden)
        yield f"{layer}.self_attn.v_proj.weight", matrix(config.num_kv_heads * dim, hidden)
        yield f"{layer}.self_attn.o_proj.weight", matrix(hidden, config.num_heads * dim)
        yield f"{layer}.mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", matrix(hidden, inner)
    yield "model.norm.weight", ones()
    if not config.tie_word_embeddings:
        yield "lm_head.weight", matrix(config.vocab_size, hidden)


class Bench:
    """One shape on one card. `bytes` is what a step reads of weights, `token_bytes` a token's KV."""

    def __init__(self, shape: str, gpu: Gpu, budget: int, sequences: int) -> None:
        self.shape = shape
        self.model = ModelConfig.from_dict(SHAPES[shape])
        tensors = dict(tensors_of(self.model))
        unread = 0 if self.model.tie_word_embeddings else tensors["model.embed_tokens.weight"].nbytes
        self.bytes = sum(tensor.nbytes for tensor in tensors.values()) - unread
        layout = kv_layout(self.model, b"random", "bfloat16", 16, "")
        self.token_bytes = layout.block_bytes // 16
        blocks = 2 * (256 + 8) * (-(-(PROMPT + LONG) // 16) + 3)  # prompts stay cached while their outputs grow
        self.config = EngineConfig(
            block_size=16, num_blocks=blocks, max_num_seqs=sequences, max_num_batched_tokens=budget, max_model_len=2048,
            dtype="bfloat16",
        )  # fmt: skip
        began = time.perf_counter()
        self.runner = CudaRunner(Llama(self.model, tensors), self.config, CudaKVCache(layout, blocks, gpu), gpu)
        self.runner.warm_up()
        self.engine = LocalEngine(self.runner, self.config)
        spare_collections()
        print(
            f"{shape}: {self.bytes / 1e9:.2f} GB of weights, ready after {time.perf_counter() - began:.1f} s",
            flush=True,
        )

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(3, self.model.vocab_size) for _ in range(PROMPT)] for _ in range(count)]

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """Seconds. Prompts come as they would from outside: ahead of the card, not all before the first step."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        count, added = 0, 0
        while added < len(prompts) or self.engine.has_work:
            for prompt in prompts[added : added + AHEAD]:
                self.engine.add_request(prompt, params)
            added += AHEAD
            count += len(self.engine.step())
        seconds = time.perf_counter() - began
        assert count == len(prompts) * tokens, f"{count} tokens of {len(prompts) * tokens}"
        return seconds

    def steady(self, prompts: Sequence[list[int]]) -> float:
        """Seconds of a step, from the moment at which all have SHORT tokens to that at which all have LONG."""
        params = SamplingParams(temperature=0, max_tokens=LONG + 150, ignore_eos=True)
        counts: dict[int, int] = {}
        marks: dict[int, float] = {}
        for first in range(0, len(prompts), AHEAD):
            for prompt in prompts[first : first + AHEAD]:
                counts[self.engine.add_request(prompt, params)] = 0
            for number, _, _ in self.engine.step():
                counts[number] += 1
        while LONG not in marks:
            for number, _, _ in self.engine.step():
                counts[number] += 1
            if (least := min(counts.values())) in (SHORT, LONG) and least not in marks:
                marks[least] = time.perf_counter()
                if least == SHORT:
                    self.runner.card_times.clear()
        for number in counts:
            self.engine.cancel(number)
        self.generate(prompts[:1], 2)
        return (marks[LONG] - marks[SHORT]) / (LONG - SHORT)

    def joining(self, batch: int, new: bool, seconds: float = 4.0) -> dict[str, Any]:
        """Gaps between steps of a decode stage that `batch` requests keep busy, each followed by the next one. Prompts
        are `new`, each with blocks of its own, or have been there before: then the stage still holds theirs."""
        rng, stage = random.Random(4), DecodeStage(self.runner, self.config)
        prompts = [tuple(prompt) for prompt in self.prompts(batch, 5)]
        running = joined = steps = 0
        began = time.perf_counter()
        while (lasted := time.perf_counter() - began) < seconds:
            if lasted < seconds / 4:  # the first ones come all at once
                self.runner.card_times.clear()
                joined = steps = stage.rows = 0
            while running < batch:
                params = SamplingParams(temperature=0, seed=0, max_tokens=rng.randint(*SHORT_OUTPUTS), ignore_eos=True)
                prompt = rng.choice(prompts)
                stage.add((rng.randrange(3, self.model.vocab_size), *prompt[1:]) if new else prompt, params)
                running, joined = running + 1, joined + 1
            running -= stage.step()
            steps += 1
        self.runner.abandon()
        one = {
            "batch": batch, "rows": stage.rows / steps, "steps": steps, "joined": joined,
            **gaps_us(list(self.runner.card_times)),
        }  # fmt: skip
        print(
            f"  batch {batch:3d} with {joined / steps:.1f} requests joining and leaving in each of "
            f"{steps} steps of {one['rows']:.0f} rows, {'new' if new else 'known'} prompts: "
            f"gap p50 {one['gap_p50_us']:.1f} p99 {one['gap_p99_us']:.1f} us",
            flush=True,
        )
        return one

    def floor_ms(self, batch: int) -> float:
        return (self.bytes + batch * (PROMPT + (LONG + SHORT) / 2) * self.token_bytes) / READ * 1e3

    def step(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        batch = len(prompts)
        step = self.steady(prompts) * 1e3
        spans = list(self.runner.card_times)[4:120]
        on_card = statistics.median(end - began for began, end in spans) / 1e6
        gaps = gaps_us(spans)
        floor, peer = self.floor_ms(batch), VLLM_STEPS_MS[self.shape].get(batch)
        one = {
            "batch": batch, "step_ms": step, "floor_ms": floor, "floor_share": floor / step, "vllm_ms": peer,
            "card_ms": on_card, **gaps,
        }  # fmt: skip
        print(
            f"  batch {batch:3d}: step {step:7.3f} ms, floor {floor:6.3f} ({floor / step:.0%}), vLLM {peer}, "
            f"on the card {on_card:7.3f}, gap p50 {one['gap_p50_us']:.1f} p99 {one['gap_p99_us']:.1f} us",
            flush=True,
        )
        return one


def gaps_us(spans: Sequence[tuple[int, int]]) -> dict[str, float]:
    """`spans` are nanoseconds at which steps began and ended."""
    gaps = sorted((after[0] - before[1]) / 1e3 for before, after in zip(spans, spans[1:], strict=False))
    return {"gap_p50_us": gaps[len(gaps) // 2], "gap_p99_us": gaps[len(gaps) * 99 // 100]}


def measure(shape: str, gpu: Gpu, budget: int, batches: Sequence[int], offline: bool) -> dict[str, Any]:
    bench = Bench(shape, gpu, budget, OFFLINE if offline else max(batches))
    prompts = bench.prompts(max(batches), 1)
    bench.generate(bench.prompts(8, 2), 2)
    seconds = bench.generate(prompts, 1)
    found: dict[str, Any] = {"prefill_tokens_per_s": len(prompts) * PROMPT / seconds}
    print(f"  prefill {found['prefill_tokens_per_s']:.0f} tokens/s, vLLM {VLLM_PREFILL.get(shape)}", flush=True)
    found["steps"] = [bench.step(prompts[:batch]) for batch in batches]
    if offline:
        found["offline_s"] = bench.generate(bench.prompts(OFFLINE, 3), 128)
        print(
            f"  offline {OFFLINE} x (1,024 in, 128 out): {found['offline_s']:.2f} s, vLLM {VLLM_OFFLINE_S[shape]}",
            flush=True,
        )
    if JOINING in batches:
        found["joining"] = bench.joining(JOINING, new=False)
        found["joining_new_prompts"] = bench.joining(JOINING, new=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(VLLM_STEPS_MS), default=sorted(VLLM_STEPS_MS))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--plot", type=Path, help="a drawing of the steps, .svg or .png; needs matplotlib")
    options = parser.parse_args(arguments)
    gpu = Gpu()
    record: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.engine_gpu", *(arguments or sys.argv[1:])]), "card": gpu.name,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "pycuda": version("pycuda")},
        "vllm": "0.24.0 on a card of the same kind, in another run", "max_num_seqs": OFFLINE,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }  # fmt: skip
    for shape in options.shapes:
        budget = options.max_num_batched_tokens
        record[shape] = measure(shape, gpu, budget, options.batches, not options.no_offline)
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plots.steps(record, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
