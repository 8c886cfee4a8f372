"""Router, prefill and decode workers that share one card, as processes: the tokens of one process, also under kill -9.

float32, in which a token depends on the company of its row only where two logits differ in the last bits of a sum: an
answer that two workers made has to be the one that `LLM` makes on the same card.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cluster import Cluster, running_cluster  # noqa: E402

from pagewire import LLM, Client, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODEL, VOCAB = "random:smollm2-135m", 49152
START_SECONDS = 120.0  # of which most may go to nvcc


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = {"model": MODEL, "device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.3, "kv_memory": None}
    folder = tmp_path_factory.mktemp("services")
    with running_cluster(folder, start=False, decode=2, transport="grpc", max_model_len=2048, **options) as cluster:
        cluster.start()
        cluster.wait_ready(seconds=START_SECONDS)
        yield cluster


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, device="cuda", dtype="float32", max_model_len=2048, kv_cache_memory_bytes="512MiB") as running:
        yield running


def prompts_and_params(count: int, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(count)
    lengths = [rng.choice((1, 15, 16, 17, 33, 200, 700)) for _ in range(count)]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    kinds: list[dict[str, float]] = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}]
    params = [
        SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True, **kinds[i % 2])  # type: ignore[arg-type]
        for i in range(count)
    ]
    return prompts, params


def in_one_process(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_idle(client: Client) -> None:
    """Every block is free again, also those that travelled to a worker that died."""
    deadline = time.monotonic() + 10
    while True:
        workers = client.server_info().workers
        if all(each.free_blocks == each.total_blocks and not each.running for each in workers):
            return
        assert time.monotonic() < deadline, f"blocks are held: {workers}"
        time.sleep(0.1)


def assert_same_but_for_ties(llm: LLM, prompt: list[int], found: list[int], expected: list[int]) -> None:
    """Where answers part, both tokens were as likely, and what follows is what one process makes of `found`."""
    assert len(found) == len(expected)
    greedy = SamplingParams(temperature=0, max_tokens=len(found), ignore_eos=True)
    while found != expected:
        at = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        [tie] = llm.generate(
            {"prompt_token_ids": prompt + found[:at]}, replace(greedy, max_tokens=1, logprobs=2), use_tqdm=False
        )
        likely = tie.outputs[0].logprobs[0]
        assert found[at] in likely and expected[at] in likely, f"token {at} is none of the two best: {likely}"
        assert abs(likely[found[at]].logprob - likely[expected[at]].logprob) < 1e-3, f"token {at} is no tie: {likely}"
        expected = found[: at + 1]
        if left := len(found) - at - 1:
            expected += in_one_process(llm, [prompt + expected], [replace(greedy, max_tokens=left)])[0]


def test_answers_of_workers_on_one_card_are_those_of_one_process(services: Cluster, llm: LLM) -> None:
    prompts, params = prompts_and_params(24, 40)
    expected = in_one_process(llm, prompts, params)
    with Client(services.address) as client, ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda ids, each: client.generate(ids, each, timeout=120), prompts, params))
        assert [list(result.token_ids) for result in found] == expected
        assert_idle(client)
        assert sum(worker.pulled_blocks for worker in client.server_info().workers) > 24


def test_a_decode_worker_killed_under_load_loses_no_token(services: Cluster, llm: LLM) -> None:
    prompts, params = prompts_and_params(32, 400)
    params = [replace(each, temperature=0, top_p=1, repetition_penalty=1) for each in params]
    expected = in_one_process(llm, prompts, params)
    with Client(services.address) as client, ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(client.generate, ids, each, timeout=200) for ids, each in zip(prompts, params, strict=True)
        ]
        deadline = time.monotonic() + 60
        while not any(each.running > 4 for each in client.server_info().workers if each.role == "decode"):
            assert time.monotonic() < deadline and not all(each.done() for each in asked), "nothing ran"
        services.kill("decode-1")
        found = [list(each.result().token_ids) for each in asked]
        for prompt, one, other in zip(prompts, found, expected, strict=True):
            assert_same_but_for_ties(llm, prompt, one, other)
        services.start("decode-1")
        services.wait_ready(seconds=START_SECONDS)
        assert_idle(client)
    services.kill("decode-1")  # this test started it
    for name in ("router", "prefill-1", "decode-2"):
        assert services.tracebacks(name) == []
