"""The prompts of a run: random tokens of chosen lengths, ShareGPT's lengths, or prompts that share beginnings.

Prompts are made of what the server's own tokenizer made of a few words, so that they have exactly the length that was
asked for and need no tokenizer here. A server that tells no token ids gets the words themselves, about one token each.
Same seed, same prompts. Sends nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve.settings import BenchError, Lengths, Settings

TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot
but some what there we can out other were all your when up use word how said an each she which do their time
if will way about many then them would write like so these her long make thing see him two has look more day
could go come did my sound no most number who over know water than call first people may down side been now
find any new work part take get place made live where after back little only round man year came show every
good me give our under name very through just form much great think say help low line before turn cause same
mean differ move right boy old too does tell sentence set three want air well also play small end put home
read hand port large spell add even land here must big high such follow act why ask men change went light
kind off need house picture try us again animal
"""
WORDS = tuple(TEXT.split())

OUTPUT_LEN = 32
# ShareGPT_V3 under the filter of vLLM's benchmark has about 215 prompt and 200 answer tokens on average, with long
# tails. After the same filter these lognormals have 213 and 204.
PROMPT_MEDIAN, PROMPT_SIGMA = 150.0, 1.5
ANSWER_MEDIAN, ANSWER_SIGMA = 130.0, 1.0
SHORTEST, LONGEST_PROMPT, LONGEST_SUM = 4, 1024, 2048

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `prompt_len` is what the prompt should have; the server's count replaces it in the results."""

    prompt: Prompt
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Material:
    """What prompts are made of: token ids, or words where the server tells no ids."""

    ids: Sequence[int] = ()

    def draw(self, count: int, rng: random.Random) -> list[int] | list[str]:
        return rng.choices(self.ids, k=count) if self.ids else rng.choices(WORDS, k=count)

    def prompt(self, parts: Sequence[int] | Sequence[str]) -> Prompt:
        return list(parts) if self.ids else " ".join(parts)  # type: ignore[arg-type]  # words, as draw made them


def make_jobs(settings: Settings, material: Material, longest: int | None, rng: random.Random) -> list[Job]:
    """`longest` is what prompt and answer of one request may have together. Not for a ShareGPT file."""
    lengths = settings.lengths
    if lengths.dataset == "prefix_repetition":
        return _prefix_jobs(settings, material, longest, rng)
    pairs = _sharegpt_shape if lengths.dataset == "sharegpt" else _random_shape
    jobs = []
    for prompt_len, output_len in pairs(settings.num_prompts, lengths, longest, rng):
        prompt = material.prompt(material.draw(prompt_len, rng))
        jobs.append(Job(prompt, prompt_len, output_len))
    return jobs


def check_fits(prompt_len: int, output_len: int, longest: int | None, flags: str) -> None:
    if longest is not None and prompt_len + output_len > longest:
        raise BenchError(
            f"{flags} ask for {prompt_len} prompt and {output_len} answer tokens, {prompt_len + output_len} in all, "
            f"and this model takes {longest}",
            usage=True,
        )


def _random_shape(count: int, lengths: Lengths, longest: int | None, rng: random.Random) -> Iterator[tuple[int, int]]:
    output_len = lengths.output_len or OUTPUT_LEN
    most = [int(length * (1 + lengths.range_ratio)) for length in (lengths.input_len, output_len)]
    check_fits(most[0], most[1], longest, "--input-len and --output-len")
    least = [max(1, int(length * (1 - lengths.range_ratio))) for length in (lengths.input_len, output_len)]
    for _ in range(count):
        yield rng.randint(least[0], most[0]), rng.randint(least[1], most[1])


def _sharegpt_shape(count: int, lengths: Lengths, longest: int | None, rng: random.Random) -> Iterator[tuple[int, int]]:
    in_all = min(LONGEST_SUM, longest or LONGEST_SUM)
    check_fits(SHORTEST, lengths.output_len or SHORTEST, in_all, "--dataset-name sharegpt and --output-len")
    made = 0
    while made < count:
        prompt_len = round(PROMPT_MEDIAN * rng.lognormvariate(0, PROMPT_SIGMA))
        output_len = lengths.output_len or round(ANSWER_MEDIAN * rng.lognormvariate(0, ANSWER_SIGMA))
        if fits(prompt_len, output_len, in_all):
            made += 1
            yield prompt_len, output_len


def fits(prompt_len: int, output_len: int, in_all: int) -> bool:
    """vLLM's filter for ShareGPT."""
    most = min(LONGEST_PROMPT, in_all)
    return SHORTEST <= prompt_len <= most and output_len >= SHORTEST and prompt_len + output_len <= in_all


def _prefix_jobs(settings: Settings, material: Material, longest: int | None, rng: random.Random) -> list[Job]:
    lengths = settings.lengths
    prompt_len, output_len = lengths.prefix_len + lengths.suffix_len, lengths.output_len or OUTPUT_LEN
    check_fits(prompt_len, output_len, longest, "--prefix-len, --suffix-len and --output-len")
    prefixes = [material.draw(lengths.prefix_len, rng) for _ in range(lengths.num_prefixes)]
    jobs = []
    for number in range(settings.num_prompts):
        parts = [*prefixes[number % len(prefixes)], *material.draw(lengths.suffix_len, rng)]
        jobs.append(Job(material.prompt(parts), prompt_len, output_len))
    rng.shuffle(jobs)
    return jobs


# ---- a ShareGPT file ----------------------------------------------------------------------------------------------


def sharegpt_pairs(path: Path, rng: random.Random) -> list[tuple[str, str]]:
    """The first two turns of each conversation, shuffled."""
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}", usage=True) from None
    except ValueError as error:
        raise BenchError(f"--dataset-path {path} is not JSON: {error}", usage=True) from None
    try:
        turns = [[str(turn["value"]) for turn in entry["conversations"][:2]] for entry in entries]
    except (TypeError, KeyError):
        raise BenchError(
            f'--dataset-path {path} must be a list of {{"conversations": [{{"value": ...}}, ...]}}', usage=True
        ) from None
    pairs = [(turn[0], turn[1]) for turn in turns if len(turn) == 2]
    if not pairs:
        raise BenchError(f"--dataset-path {path} has no conversation of two turns", usage=True)
    rng.shuffle(pairs)
    return pairs


def repeated(jobs: Sequence[Job], count: int, refused: Callable[[], BenchError]) -> list[Job]:
    """As many as asked for: a small file is used again and again, as vLLM does."""
    if not jobs:
        raise refused()
    return [jobs[number % len(jobs)] for number in range(count)]
