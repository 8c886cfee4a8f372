"""LLM and AsyncLLMEngine: vLLM's names and shapes, the cluster's tokens, and nothing held by whoever left."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from cluster import Cluster

from engine.types import SamplingParams
from pagewire import LLM, AsyncLLMEngine, Client, EngineArgs, PagewireError, RequestOutput
from pagewire.engine_thread import EngineThread

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def arguments(model_cache: Path, **more: Any) -> dict[str, Any]:
    return {"kv_cache_memory_bytes": "4MiB", "download_dir": model_cache, "threads": 1, **more}


@pytest.fixture(scope="module")
def llm(model_cache: Path) -> Iterator[LLM]:
    with LLM("random:tiny", **arguments(model_cache, max_num_seqs=4)) as running:
        yield running


@pytest.fixture(scope="module")
def engine(model_cache: Path) -> Iterator[AsyncLLMEngine]:
    running = AsyncLLMEngine.from_engine_args(EngineArgs(model="random:tiny", **arguments(model_cache)))
    yield running
    running.shutdown()


def assert_nothing_held(thread: EngineThread) -> None:
    deadline = time.monotonic() + 5
    while thread.engine.has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.engine.audit()


# ---- LLM ----------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_in_the_known_shape(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert len({output.request_id for output in outputs}) == 20
    for output in outputs:
        assert output.finished and output.prompt_token_ids and output.prompt_logprobs is None
        (choice,) = output.outputs
        assert choice.index == 0 and choice.text and len(choice.token_ids) == 12
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)
        assert choice.logprobs is None and choice.cumulative_logprob is None
        assert output.metrics is not None and output.metrics.first_token_time is not None
        assert output.metrics.arrival_time <= output.metrics.first_token_time <= (output.metrics.finished_time or 0)
    assert_nothing_held(llm._thread)


def test_one_string_token_ids_and_lists_of_parameters_are_taken(llm: LLM) -> None:
    (text,) = llm.generate("hello", GREEDY, use_tqdm=False)
    ids = text.prompt_token_ids
    alike: list[Any] = [{"prompt_token_ids": ids}, ids, {"prompt": "hello"}, "hello"]
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(alike, [GREEDY, GREEDY, GREEDY, short], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [text.outputs[0].token_ids] * 3 + [
        text.outputs[0].token_ids[:3]
    ]
    assert outputs[0].prompt is None and outputs[2].prompt == "hello"
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == text.outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_logprobs_are_by_token_id_and_add_up(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None and choice.cumulative_logprob is not None
    for token_id, found in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(found)) == token_id and 2 <= len(found) <= 3
        assert sorted(each.rank or 0 for each in found.values())[:2] == [1, 2]
    chosen = [found[token_id].logprob for token_id, found in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token_id, report in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert report is not None and token_id in report and report[token_id].decoded_token is not None


def test_a_stop_string_or_token_ends_a_choice_and_is_named(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = next(text[place : place + 2] for place in range(3, len(text) - 1) if "\ufffd" not in text[place : place + 2])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    (choice,) = llm.generate("hello", params, use_tqdm=False)[0].outputs
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[ids[4]])
    (choice,) = llm.generate("hello", params, use_tqdm=False)[0].outputs
    assert choice.token_ids == ids[: ids.index(ids[4]) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[4])
    assert_nothing_held(llm._thread)


def test_parameters_have_the_names_and_values_that_vllm_users_write(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = next(text[place : place + 2] for place in range(3, len(text) - 1) if "\ufffd" not in text[place : place + 2])
    given: dict[str, Any] = {
        "top_k": -1, "stop": stop, "stop_token_ids": None, "logit_bias": None, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **given)
    assert params.top_k == 0 and params.include_stop_in_output and params.stop_token_ids == ()
    (answer,) = llm.generate("hello", params, use_tqdm=False)
    assert answer.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_a_progress_bar_is_shown_unless_it_is_off(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == "" and "2/2" in shown.err and "24 tokens" in shown.err


def test_tokens_equal_those_of_the_cluster(llm: LLM, cluster: Cluster) -> None:
    cases = [
        ("hello", SAMPLED),
        ("hello", SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=16)),
        ("a stop", SamplingParams(temperature=0, max_tokens=40, stop=["1", "e"], logprobs=2)),
        ([5, 6, 7], SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=9, max_tokens=16)),
        ("x" * 200, SamplingParams(temperature=0, max_tokens=16, min_tokens=8)),
    ]
    mine = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases], use_tqdm=False)
    chat = [{"role": "user", "content": "hé"}]
    with Client(cluster.address) as client:
        for (prompt, params), output in zip(cases, mine, strict=True):
            theirs = client.generate(prompt, params, return_token_ids=True)
            for choice, other in zip(output.outputs, theirs.choices, strict=True):
                assert choice.token_ids == list(other.token_ids)
                assert choice.finish_reason == (other.finish_reason.name.lower() if other.finish_reason else None)
                assert choice.stop_reason == other.stop
            texts = [choice.text for choice in client.generate(prompt, params).choices]
            assert [choice.text for choice in output.outputs] == texts
        assert llm.chat(chat, SAMPLED, use_tqdm=False)[0].outputs[0].text == client.generate(chat, SAMPLED).text


def test_a_seed_of_the_engine_repeats_requests_that_have_none(model_cache: Path) -> None:
    params = SamplingParams(max_tokens=8, n=2)
    found = []
    for seed in (1, 1, 2):
        with LLM("random:tiny", seed=seed, **arguments(model_cache)) as llm:
            (output,) = llm.generate("hello", params, use_tqdm=False)
            found.append([choice.token_ids for choice in output.outputs])
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][1]


def test_several_chats_go_through_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "one"}]
    one, bare = (
        llm.chat([chat, chat], GREEDY, use_tqdm=False)[0],
        llm.chat(chat, GREEDY, use_tqdm=False, add_generation_prompt=False)[0],
    )
    assert (
        one.prompt and "one" in one.prompt and one.prompt.startswith(bare.prompt or "?") and one.prompt != bare.prompt
    )
    with pytest.raises(PagewireError, match="message 0 has the role 'me'"):
        llm.chat([{"role": "me", "content": "x"}])


def test_another_tokenizer_brings_its_chat_template(llm: LLM, model_cache: Path, tmp_path: Path) -> None:
    shutil.copy(llm._thread.text.directory / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!", "utf-8")
    with LLM("random:tiny", tokenizer=tmp_path, **arguments(model_cache)) as other:
        assert other.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)[0].prompt == "hello!"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_says_so_to_everyone(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("the device is gone")

    with LLM("random:tiny", **arguments(model_cache)) as llm:
        monkeypatch.setattr(llm._thread.engine, "step", broken)
        for _ in range(2):
            with pytest.raises(PagewireError, match="the engine has failed: RuntimeError: the device is gone"):
                llm.generate(["a", "b"], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"foo": 1}, "foo is no argument of the engine; it takes model, tokenizer"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but tensor parallelism is not built yet"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be a whole number"),
        ({"block_size": 17}, "block_size: "),
        ({"dtype": "int4"}, "dtype: "),
        ({"max_model_len": 10**8}, "max_model_len is 100000000 and the model takes at most"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes of 10 bytes holds 0 KV blocks"),
        ({"tokenizer": "/nowhere"}, "tokenizer must be a directory with tokenizer.json"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"model": "nope"}, "there is no model 'nope' on this machine"),
    ],
)
def test_a_wrong_argument_is_one_sentence_that_names_it(
    given: dict[str, Any], sentence: str, model_cache: Path
) -> None:
    with pytest.raises(PagewireError) as caught:
        LLM(**{"model": "random:tiny", **arguments(model_cache), **given})
    assert caught.value.sentence.startswith(sentence) and "--" not in caught.value.sentence


def test_an_argument_that_asks_for_nothing_unbuilt_is_fine() -> None:
    EngineArgs("random:tiny", tensor_parallel_size=1, trust_remote_code=False, enable_prefix_caching=True, dtype="half")


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ("", GREEDY, "the prompt is empty"),
        ([[1, -2]], GREEDY, "whole numbers from 0 on"),
        ([[1, 10**6]], GREEDY, "prompt_token_ids has the token id 1000000"),
        ({"prompt": "x", "multi_modal_data": 1}, GREEDY, "and not multi_modal_data"),
        ("hello", SamplingParams(max_tokens=10**6), "5 prompt tokens and max_tokens 1000000 are more than"),
        ("hello", SamplingParams(stop_token_ids=[10**6]), "stop_token_ids has the token id"),
        (["hello", "x"], [GREEDY], "there are 2 prompts and 1 sampling_params"),
        (5, GREEDY, "a prompt must be a text or token ids"),
        (None, GREEDY, "a prompt must be a text or token ids"),
        ("hello", {"max_tokens": 4}, "sampling_params must be SamplingParams, got a dict"),
        ("hello", 4, "sampling_params must be SamplingParams, got a int"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_the_engine_goes_on(
    llm: LLM, prompt: Any, params: Any, sentence: str
) -> None:
    with pytest.raises(PagewireError, match=sentence):
        llm.generate(prompt, params, use_tqdm=False)
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_an_interrupt_ends_what_runs_and_what_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupted(total: int, show: bool) -> Iterator[Any]:
        def advance(output: RequestOutput) -> None:
            raise KeyboardInterrupt

        yield advance

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pagewire.llm._progress", interrupted)
        llm.generate(["short"] * 30, [GREEDY, *[SamplingParams(max_tokens=200, ignore_eos=True)] * 29])
    assert_nothing_held(llm._thread)
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


async def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_it_works_in_a_notebook(model_cache: Path) -> None:
    cells = [
        "from pagewire import LLM, SamplingParams",
        f"llm = LLM('random:tiny', download_dir={str(model_cache)!r}, kv_cache_memory_bytes='4MiB', threads=1)",
        "outputs = llm.generate(['a', 'b'], SamplingParams(temperature=0, max_tokens=4))",
        "import asyncio; asyncio.get_running_loop(); print(sum(len(each.outputs[0].token_ids) for each in outputs))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    assert "8\n" in notebook.cells[-1].outputs[0].text


def test_a_program_that_does_not_close_its_engine_ends(model_cache: Path) -> None:
    code = (
        "from pagewire import LLM, SamplingParams\n"
        f"llm = LLM(model='random:tiny', download_dir={str(model_cache)!r}, kv_cache_memory_bytes='4MiB')\n"
        "print(llm.generate('hello', SamplingParams(max_tokens=4))[0].finished)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_closed_engine_says_so(model_cache: Path) -> None:
    llm = LLM("random:tiny", **arguments(model_cache))
    llm.close()
    llm.close()
    with pytest.raises(PagewireError, match="the engine was closed"):
        llm.generate("hello")


def test_importing_pagewire_and_naming_its_doors_loads_no_torch() -> None:
    code = "import sys, pagewire; light = len(sys.modules); from pagewire import LLM, AsyncLLMEngine, EngineArgs;"
    code += "print(light < 200, 'torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False False\n"


def test_closing_it_gives_the_memory_back_though_somebody_still_holds_it(model_cache: Path) -> None:
    llm = LLM("random:tiny", **arguments(model_cache))
    runner = weakref.ref(llm._thread.engine._runner)
    llm.generate("x", GREEDY, use_tqdm=False)
    assert runner() is not None
    llm.close()
    assert runner() is None


def test_without_a_card_auto_says_one_line_and_runs_on_the_cpu_and_cuda_refuses(
    model_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM("random:tiny", device="auto", **arguments(model_cache)) as llm:
        assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("running on the CPU: torch ")
    with pytest.raises(PagewireError, match="^device cuda: torch .*; device cpu and auto run on the CPU$"):
        LLM("random:tiny", device="cuda", **arguments(model_cache))


# ---- AsyncLLMEngine -----------------------------------------------------------------------------------------------


async def collect(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def test_streams_are_cumulative_and_end_as_a_batch_does(engine: AsyncLLMEngine, llm: LLM) -> None:
    expected = llm.generate(["a", "b", "c"], SAMPLED, use_tqdm=False)
    streams = await asyncio.gather(*(collect(engine, prompt, SAMPLED, prompt) for prompt in "abc"))
    for outputs, whole in zip(streams, expected, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in zip(outputs, outputs[1:], strict=False):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
        assert outputs[-1].outputs == whole.outputs and outputs[-1].request_id == outputs[-1].prompt


async def test_an_aborted_request_ends_with_what_it_has(engine: AsyncLLMEngine) -> None:
    last = None
    async for output in engine.generate("long", SamplingParams(max_tokens=1500, ignore_eos=True), "gone"):
        if last is None:
            await engine.abort("gone")
            await engine.abort("unknown")
        last = output
    assert last is not None and last.finished
    assert last.outputs[0].finish_reason == "abort" and 0 < len(last.outputs[0].token_ids) < 1500
    assert_nothing_held(engine._thread)


async def test_a_request_can_be_aborted_before_its_prompt_is_read(engine: AsyncLLMEngine) -> None:
    task = asyncio.create_task(collect(engine, "early", SamplingParams(max_tokens=400, ignore_eos=True), "early"))
    await asyncio.sleep(0)
    await engine.abort("early")
    last = (await task)[-1]
    assert last.finished and last.outputs[0].finish_reason == "abort"


async def test_a_reader_that_leaves_or_is_cancelled_frees_its_blocks(engine: AsyncLLMEngine) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
    stream = engine.generate("left", endless, "left")
    async for _ in stream:
        break
    await stream.aclose()
    task = asyncio.create_task(collect(engine, "cancelled", endless, "cancelled"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(assert_nothing_held, engine._thread)


async def test_a_running_request_id_cannot_be_used_twice(engine: AsyncLLMEngine) -> None:
    stream = engine.generate("one", GREEDY, "same")
    await anext(stream)
    with pytest.raises(PagewireError, match="'same' is running already"):
        await collect(engine, "two", GREEDY, "same")
    await stream.aclose()
    assert (await collect(engine, "two", GREEDY, "same"))[-1].finished


async def test_streams_of_an_engine_that_is_shut_down_end_with_an_error(model_cache: Path) -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs("random:tiny", **arguments(model_cache)))
    stream = engine.generate("one", SamplingParams(max_tokens=1500, ignore_eos=True), "one")
    await anext(stream)
    engine.shutdown()
    with pytest.raises(PagewireError, match="the engine was closed"):
        async for _ in stream:
            pass


def test_an_output_says_what_the_prefix_cache_gave_and_how_long_it_waited(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(60, 120))}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (first,), (again,) = llm.generate(prompt, params), llm.generate(prompt, params)
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == 48, "the full blocks before the last token"
    times = again.metrics
    assert times is not None and times.first_scheduled_time is not None and times.first_token_time is not None
    assert times.time_in_queue is not None and times.time_in_queue >= 0
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.last_token_time is not None and times.first_token_time <= times.last_token_time
