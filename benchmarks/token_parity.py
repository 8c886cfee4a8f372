"""Greedy tokens beside transformers' on the same weights in float32, over chunk sizes, block sizes and batching.

    python -m benchmarks.token_parity --model smollm2 --state parity.json     (20 prompts, 12 configurations)
    python -m benchmarks.token_parity --model random:tiny --quick             (4 prompts, 2 configurations)

A difference counts unless transformers' own two best logits there are closer than 1e-4; those are listed. With
--state, references and finished configurations are kept in that file and a second run goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.batch import Batch, Row, SampleInput
from engine.types import SamplingParams

if TYPE_CHECKING:
    from engine.models.llama import Llama
    from engine.runner import ModelRunner

CLOSE = 1e-4  # top two logits nearer than this may swap by rounding alone
GREEDY = SamplingParams(temperature=0)


class Setting(NamedTuple):
    """`at_once` sequences share each step; a step prefills at most `chunk` tokens."""

    at_once: int
    chunk: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.at_once} at a time, chunks of {self.chunk}, blocks of {self.block_size}"


class Reference(NamedTuple):
    """transformers' tokens and, at each, the distance between its two best logits."""

    tokens: list[int]
    gaps: list[float]


class Difference(NamedTuple):
    prompt: int
    length: int
    at: int
    ours: int
    theirs: int
    gap: float

    @property
    def counts(self) -> bool:
        return self.gap >= CLOSE


FULL = [Setting(n, chunk, block) for n in (1, 16) for chunk in (16, 64, 2048) for block in (16, 64)]
QUICK = [Setting(1, 64, 16), Setting(16, 16, 64)]


def lengths(count: int, longest: int) -> list[int]:
    """From 5 to `longest`, evenly spread in ratio."""
    return [round(5 * (longest / 5) ** (i / (count - 1))) for i in range(count)]


# ---- transformers -------------------------------------------------------------------------------------------------


def reference(peer: Any, prompt: Sequence[int], count: int) -> Reference:
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=peer.config)
    ids = torch.tensor([list(prompt)])
    tokens: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        while len(tokens) < count:
            logits = peer(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            values, best = logits.topk(2)
            tokens.append(int(best[0]))
            gaps.append(float(values[0] - values[1]))
            ids = best[:1].view(1, 1)
    return Reference(tokens, gaps)


# ---- ours: the smallest continuous loop ---------------------------------------------------------------------------


@dataclass(slots=True)
class Running:
    number: int
    prompt: Sequence[int]
    blocks: list[int]
    done: int = 0  # positions in the cache
    output: list[int] = field(default_factory=list)

    def row(self, budget: int) -> Row | None:
        """The next chunk of at most `budget` prompt tokens, or a decode row, which costs no budget."""
        sample = SampleInput(GREEDY, len(self.output), self.prompt, self.output)
        if self.output:
            return Row(self.number, self.output[-1:], self.done, self.blocks, sample)
        tokens = self.prompt[self.done : self.done + budget]
        last = self.done + len(tokens) == len(self.prompt)
        return Row(self.number, tokens, self.done, self.blocks, sample if last else None) if tokens else None


def generate(runner: ModelRunner, prompts: Sequence[Sequence[int]], count: int, setting: Setting) -> list[list[int]]:
    """Greedy tokens of every prompt; sequences join and leave at any step, in blocks of mixed order."""
    free = list(range(runner.cache.num_blocks))
    random.Random(1).shuffle(free)
    waiting = list(enumerate(prompts))
    running: list[Running] = []
    finished: dict[int, list[int]] = {}
    while waiting or running:
        fresh: list[int] = []
        while waiting and len(running) < setting.at_once:
            number, prompt = waiting.pop(0)
            blocks = [free.pop() for _ in range(-(-(len(prompt) + count) // setting.block_size))]
            fresh += blocks
            running.append(Running(number, prompt, blocks))
        batch = Batch(zero_blocks=fresh)
        budget = setting.chunk
        for one in running:
            if row := one.row(budget):
                batch.rows.append(row)
                budget -= 0 if one.output else len(row.tokens)
        by_number = {one.number: one for one in running}
        for row, token in zip(batch.rows, runner.step(batch).tokens, strict=True):
            one = by_number[row.slot]
            one.done += len(row.tokens)
            if token is not None:
                one.output.append(token.token_id)
        for one in [one for one in running if len(one.output) == count]:
            running.remove(one)
            free += one.blocks
            finished[one.number] = one.output
    return [finished[number] for number in range(len(prompts))]


def runner_for(model: Llama, block_size: int, tokens: int) -> ModelRunner:
    """A runner whose pool holds `tokens`."""
    from engine.backend.cpu import CPUBackend
    from engine.config import EngineConfig
    from engine.kv_cache import KVCache, kv_layout
    from engine.runner import ModelRunner

    blocks = tokens // block_size
    cache = KVCache(kv_layout(model.config, b"", "float32", block_size, ""), blocks)
    longest = min(tokens, model.config.max_position_embeddings)
    return ModelRunner(
        model, EngineConfig(block_size=block_size, num_blocks=blocks, max_model_len=longest), cache, CPUBackend()
    )


def compare(
    prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], references: Sequence[Reference]
) -> Iterator[Difference]:
    """The first difference of each prompt: after it the two continue different texts."""
    for number, (mine, (theirs, gaps)) in enumerate(zip(ours, references, strict=True)):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                yield Difference(number, len(prompts[number]), index, a, b, gaps[index])
                break


# ---- the command --------------------------------------------------------------------------------------------------


class State:
    """What is finished, in a JSON file if there is a path. A file of other prompts or another model is replaced."""

    def __init__(self, path: Path | None, identity: str) -> None:
        self.path = path
        self.data: dict[str, Any] = {"identity": identity, "references": {}, "settings": {}}
        if path is not None and path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("identity") == identity:
                self.data = found

    def save(self) -> None:
        if self.path is not None:
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.data), encoding="utf-8")
            temporary.replace(self.path)


def load(name: str) -> tuple[Llama, Any, Path, bytes]:
    """Our model, transformers' over the same weights, the directory, and the digest."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.config import ModelConfig
    from engine.loader import load_tensors, resolve_model
    from engine.models.llama import Llama

    source = resolve_model(name)
    tensors = load_tensors(source, torch.float32)
    peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.dir), dtype=torch.float32).eval()
    peer.load_state_dict(tensors, strict=False)
    peer.tie_weights()
    return Llama(ModelConfig.from_dir(source.dir), tensors), peer, source.dir, source.digest


def text_prompts(folder: Path, count: int, longest: int) -> list[list[int]]:
    """Pieces of the standard library's own text: English and code, on every machine, without a network."""
    from tokenizers import Tokenizer

    text = Path(argparse.__file__).read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    rng = random.Random(0)
    starts = [rng.randrange(len(ids) - longest) for _ in range(count)]
    return [ids[start : start + size] for start, size in zip(starts, lengths(count, longest), strict=True)]


def run(name: str, quick: bool, tokens: int, path: Path | None) -> int:
    """Prints a line per configuration; returns how many differences count."""
    model, peer, folder, digest = load(name)
    longest = min(300 if quick else 3000, model.config.max_position_embeddings - tokens)
    prompts = text_prompts(folder, 4 if quick else 20, longest)
    state = State(path, f"{digest.hex()} {tokens} {[len(prompt) for prompt in prompts]} {sys.version_info[:2]}")
    found: dict[str, Any] = state.data["references"]
    for number, prompt in enumerate(prompts):
        if str(number) not in found:
            found[str(number)] = reference(peer, prompt, tokens)
            state.save()
    references = [Reference(*found[str(number)]) for number in range(len(prompts))]
    del peer
    counted = 0
    for setting in QUICK if quick else FULL:
        record = state.data["settings"].get(str(setting))
        if record is None:
            record = _measure(model, prompts, references, tokens, setting)
            state.data["settings"][str(setting)] = record
            state.save()
        differences = [Difference(*one) for one in record["differences"]]
        bad = sum(one.counts for one in differences)
        counted += bad
        verdict = f"{bad} DIFFER" if bad else "equal"
        print(f"{setting!s:44} {len(prompts)} prompts x {tokens} tokens: {verdict} ({record['seconds']:.0f} s)")
        for one in differences:
            kind = "counts" if one.counts else "a near tie"
            print(
                f"    prompt {one.prompt} ({one.length} tokens), token {one.at}: ours {one.ours}, theirs "
                f"{one.theirs}, top two {one.gap:.1e} apart: {kind}"
            )
    print(f"differences that count: {counted}")
    return counted


def _measure(
    model: Llama, prompts: list[list[int]], references: list[Reference], tokens: int, setting: Setting
) -> dict[str, Any]:
    began = time.perf_counter()
    each = sorted((-(-(len(prompt) + tokens) // setting.block_size) for prompt in prompts), reverse=True)
    runner = runner_for(model, setting.block_size, sum(each[: setting.at_once]) * setting.block_size)
    differences = list(compare(prompts, generate(runner, prompts, tokens, setting), references))
    return {"differences": differences, "seconds": time.perf_counter() - began}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Greedy tokens beside transformers' on the same weights.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="4 prompts of at most 300 tokens, 2 configurations")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=max(1, os.cpu_count() or 1))
    parser.add_argument("--state", type=Path, help="keep what is finished in this file, and go on from it")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(options.threads)
    return 1 if run(options.model, options.quick, options.tokens, options.state) else 0


if __name__ == "__main__":
    sys.exit(main())
