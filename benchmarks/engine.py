"""Engine speed beside transformers: the same weights, threads and prompts, in one process, float32.

    python -m benchmarks.engine --model random:smollm2-135m --threads 2 --json engine.json

Times decode steps at batch 1 and 8, a prefill, and continuous against static batching, and prints each ratio beside
its floor. Ours and theirs alternate in short turns and medians are compared, because a shared machine drifts. Run it
on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.batch import Batch, Row, SampleInput
from engine.types import SamplingParams

if TYPE_CHECKING:
    from engine.runner import ModelRunner

BLOCK_SIZE = 16
SLOTS = 8
MAX_LEN = 2048
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class Figure:
    """`ratio` is how many times as fast ours is; `floor` is what it has to reach."""

    name: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float
    floor: float

    @property
    def passed(self) -> bool:
        return self.ratio >= self.floor


def figure(name: str, ours: float, peer: str, theirs: float, floor: float) -> Figure:
    return Figure(name, ours * 1e3, peer, theirs * 1e3, theirs / ours, floor)


# ---- the two engines ----------------------------------------------------------------------------------------------


def load(model: str, threads: int) -> tuple[ModelRunner, Any]:
    """Our runner and a transformers model over the same weights."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.backend.cpu import CPUBackend
    from engine.config import EngineConfig, ModelConfig
    from engine.kv_cache import KVCache, kv_layout
    from engine.loader import load_tensors, resolve_model
    from engine.models.llama import Llama
    from engine.runner import ModelRunner

    torch.set_num_threads(threads)
    source = resolve_model(model)
    tensors = load_tensors(source, torch.float32)
    peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.dir), dtype=torch.float32).eval()
    peer.load_state_dict(tensors, strict=False)
    peer.tie_weights()
    config = ModelConfig.from_dir(source.dir)
    blocks = (SLOTS + 1) * MAX_LEN // BLOCK_SIZE
    cache = KVCache(kv_layout(config, source.digest, "float32", BLOCK_SIZE, ""), blocks)
    settings = EngineConfig(block_size=BLOCK_SIZE, num_blocks=blocks, max_model_len=MAX_LEN, threads=threads)
    return ModelRunner(Llama(config, tensors), settings, cache, CPUBackend()), peer


class Ours:
    """`batch` sequences in fixed blocks; seek() goes back to the end of the prompts."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]]) -> None:
        self.runner = runner
        self.prompts = prompts
        each = MAX_LEN // BLOCK_SIZE
        self.tables = [list(range(i * each, (i + 1) * each)) for i in range(len(prompts))]
        self.lengths = [0] * len(prompts)
        self.last = [0] * len(prompts)

    def _row(self, slot: int, tokens: list[int], start: int) -> Row:
        used = -(-(start + len(tokens)) // BLOCK_SIZE)
        sample = SampleInput(GREEDY, 0, self.prompts[slot], [])
        return Row(slot, tokens, start, self.tables[slot][:used], sample)

    def _run(self, rows: list[Row]) -> None:
        for row, token in zip(rows, self.runner.step(Batch(rows)).tokens, strict=True):
            assert token is not None
            self.last[row.slot] = token.token_id
            self.lengths[row.slot] = row.start + len(row.tokens)

    def prefill(self, slots: list[int]) -> None:
        self._run([self._row(slot, self.prompts[slot], 0) for slot in slots])

    def step(self, slots: list[int]) -> None:
        self._run([self._row(slot, [self.last[slot]], self.lengths[slot]) for slot in slots])

    def seek(self) -> None:
        self.lengths = [len(prompt) for prompt in self.prompts]


class Theirs:
    """The plain transformers loop: one forward with a DynamicCache, then argmax."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        import torch

        self.model = model
        self.prompts = torch.tensor(prompts)
        self.cache: Any = None
        self.last: Any = None

    def _run(self, ids: Any) -> None:
        import torch

        with torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.last = out.logits[:, -1].argmax(-1, keepdim=True)

    def prefill(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        self._run(self.prompts)

    def step(self) -> None:
        self._run(self.last)

    def seek(self) -> None:
        if (extra := self.cache.get_seq_length() - self.prompts.shape[1]) > 0:
            self.cache.crop(-extra)


# ---- what is timed ------------------------------------------------------------------------------------------------


def timed(fn: Callable[[], None]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def prompts_of(runner: ModelRunner, count: int, length: int) -> list[list[int]]:
    rng = random.Random(length * 1000 + count)
    return [[rng.randrange(3, runner.vocab_size) for _ in range(length)] for _ in range(count)]


def decode(runner: ModelRunner, peer: Any, batch: int, rounds: int, steps: int, floor: float) -> Figure:
    """Medians of single steps after 128-token prompts, in turns of `steps` steps each."""
    prompts = prompts_of(runner, batch, 128)
    ours, theirs = Ours(runner, prompts), Theirs(peer, prompts)
    slots = list(range(batch))
    ours.prefill(slots)
    theirs.prefill()
    mine: list[float] = []
    other: list[float] = []
    for turn in range(rounds + 1):
        ours.seek()
        theirs.seek()
        a = [timed(lambda: ours.step(slots)) for _ in range(steps)]
        b = [timed(theirs.step) for _ in range(steps)]
        if turn:  # the first turn warms up
            mine += a
            other += b
    name = f"decode step, batch {batch}"
    return figure(name, statistics.median(mine), "transformers", statistics.median(other), floor)


def prefill(runner: ModelRunner, peer: Any, length: int, rounds: int, floor: float) -> Figure:
    prompts = prompts_of(runner, 1, length)
    ours, theirs = Ours(runner, prompts), Theirs(peer, prompts)
    mine: list[float] = []
    other: list[float] = []
    for turn in range(rounds + 1):
        a, b = timed(lambda: ours.prefill([0])), timed(theirs.prefill)
        if turn:
            mine.append(a)
            other.append(b)
    name = f"prefill of {length} tokens"
    return figure(name, statistics.median(mine), "transformers", statistics.median(other), floor)


def continuous(runner: ModelRunner, requests: int, longest: int, floor: float) -> Figure:
    """The same requests on 8 slots: refilled as they end, and as batches that run until their longest ends."""
    rng = random.Random(7)
    wanted = [rng.randint(8, longest) for _ in range(requests)]
    prompts = prompts_of(runner, requests, 128)

    def serve(may_refill: Callable[[int], bool], drops: bool) -> None:
        ours = Ours(runner, prompts[:SLOTS])
        left: dict[int, int] = {}
        waiting = list(range(requests))
        while waiting or any(count > 0 for count in left.values()):
            for slot in [slot for slot, count in left.items() if count <= 0 and drops]:
                del left[slot]
            if may_refill(max(left.values(), default=0)):
                free = [slot for slot in range(SLOTS) if left.get(slot, 0) <= 0][: len(waiting)]
                taken = [waiting.pop(0) for _ in free]
                for slot, request in zip(free, taken, strict=True):
                    ours.prompts[slot] = prompts[request]
                    left[slot] = wanted[request] - 1
                if free:
                    ours.prefill(free)
            ours.step(sorted(left)) if left else None
            left = {slot: count - 1 for slot, count in left.items()}

    mine = timed(lambda: serve(lambda most: True, drops=True))
    other = timed(lambda: serve(lambda most: most <= 0, drops=False))
    name = f"{requests} requests of 8-{longest} tokens, {SLOTS} slots"
    return figure(name, mine, "static batches of 8", other, floor)


def table(figures: list[Figure]) -> str:
    lines = [f"{'':46}{'ours':>12}  {'peer':<22}{'':>12}{'ratio':>8}{'floor':>8}"]
    for one in figures:
        mark = "" if one.passed else "  BELOW"
        lines.append(
            f"{one.name:46}{one.ours_ms:>9.2f} ms  {one.peer:<22}{one.peer_ms:>9.2f} ms"
            f"{one.ratio:>8.2f}{one.floor:>8.2f}{mark}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Engine speed beside transformers on the same weights.")
    parser.add_argument("--model", default="random:smollm2-135m")
    parser.add_argument("--threads", type=int, default=max(1, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine per figure")
    parser.add_argument("--only", nargs="*", choices=["batch1", "batch8", "prefill", "continuous"])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    runner, peer = load(options.model, options.threads)
    rounds = options.rounds
    runs: dict[str, Callable[[], Figure]] = {
        "batch1": lambda: decode(runner, peer, 1, rounds, 16, 1.05),
        "batch8": lambda: decode(runner, peer, SLOTS, rounds, 16, 1.15),
        "prefill": lambda: prefill(runner, peer, 1024, rounds, 0.95),
        "continuous": lambda: continuous(runner, 32, 256, 1.5),
    }
    figures = [runs[name]() for name in options.only or runs]
    print(f"{options.model}, float32, {options.threads} threads")
    print(table(figures))
    if options.json:
        record = {"model": options.model, "threads": options.threads, "figures": [asdict(one) for one in figures]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.passed for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
