"""What a client of the router sees: answers, streams, deadlines, cancellation and errors, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from router_front import HELLO, Front, logprob_of, make_model_dir, make_tokenizer, running_front, until

from engine.messages import Failed, PrefillStart, Reason
from engine.types import SamplingParams
from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc
from router.admission import RouterConfig
from router.front import Deadlines
from router.workers import Role
from wire.tracing import Incoming, Off

ENCODED = make_tokenizer()
Script = Callable[[Sequence[int], SamplingParams, int], int]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def says(text: str) -> Script:
    """Workers that answer every prompt with this text, over and over."""
    ids = ENCODED.encode(text, add_special_tokens=False).ids
    return lambda prompt, params, index: ids[index % len(ids)]


def stub(front: Front) -> generation_pb2_grpc.GenerationServiceStub:
    return generation_pb2_grpc.GenerationServiceStub(front.channel)


def request(text: str = "hello", **parts: Any) -> gpb.GenerateRequest:
    parts.setdefault("stopping", gpb.StoppingParams(max_tokens=8))
    return gpb.GenerateRequest(text=text, **parts)


async def collect(front: Front, asked: gpb.GenerateRequest, **knobs: Any) -> list[gpb.GenerateStreamResponse]:
    return [each async for each in stub(front).GenerateStream(gpb.GenerateStreamRequest(request=asked, **knobs))]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def details(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None, "the status has details"
    found = [kind.FromString(each.value) for each in status.details if each.Is(kind.DESCRIPTOR)]
    return found[0] if found else None


def bad_field(error: grpc.aio.AioRpcError) -> str:
    return str(details(error, error_details_pb2.BadRequest).field_violations[0].field)


# ---- answers ------------------------------------------------------------------------------------------------------


async def test_generate_answers_with_text_reason_usage_and_timing(directory: Path) -> None:
    async with running_front(directory, says("hello wörld, ")) as front:
        answer = await stub(front).Generate(request(request_id="mine"))
        choice = answer.choices[0]
        assert answer.request_id == "mine" and answer.model == "tiny"
        assert "hello wörld, ".startswith(choice.text) and choice.text
        assert choice.finish_reason == gpb.FINISH_REASON_LENGTH and not choice.token_ids
        assert answer.usage == gpb.Usage(prompt_tokens=1, completion_tokens=8, cached_prompt_tokens=1)
        assert answer.timing.decode.nanos > 0 and answer.timing.time_to_first_token.nanos > 0


async def test_a_stream_is_started_deltas_and_finished_and_equals_the_unary_answer(directory: Path) -> None:
    asked = request(output=gpb.OutputOptions(return_text=True, return_token_ids=True))
    async with running_front(directory, says("héllo ✓ ")) as front:
        events = await collect(front, asked)
        whole = await stub(front).Generate(asked)
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"delta"}
        assert events[0].started.prompt_tokens == 1 and events[0].started.seed > 0
        deltas = [event.delta for event in events[1:-1]]
        assert "".join(delta.text for delta in deltas) == whole.choices[0].text
        assert [each for delta in deltas for each in delta.token_ids] == list(whole.choices[0].token_ids)
        assert deltas[-1].finish_reason == gpb.FINISH_REASON_LENGTH
        assert not any(delta.finish_reason for delta in deltas[:-1])
        assert events[-1].finished.usage.completion_tokens == 8


async def test_no_delta_splits_a_character(directory: Path) -> None:
    async with running_front(directory, says("🎉")) as front:
        events = await collect(front, request(stopping=gpb.StoppingParams(max_tokens=12)))
        texts = [event.delta.text for event in events if event.HasField("delta")]
        assert "".join(texts) == "🎉🎉🎉" and all(set(text) <= {"🎉"} for text in texts)


async def test_a_stop_string_ends_the_answer_at_the_workers_too(directory: Path) -> None:
    async with running_front(directory, says("one two three four ")) as front:
        stopping = gpb.StoppingParams(max_tokens=400, stop=["two th"])
        answer = (await stub(front).Generate(request(stopping=stopping))).choices[0]
        assert answer.text == "one " and answer.finish_reason == gpb.FINISH_REASON_STOP
        assert answer.stop_match.text == "two th"
        stopping.include_stop_in_output = True
        assert (await stub(front).Generate(request(stopping=stopping))).choices[0].text == "one two th"
        await until(lambda: len(front.workers.cancelled) == 2)
        assert not front.workers.jobs


async def test_an_end_token_is_counted_and_not_shown(directory: Path) -> None:
    stop = ENCODED.encode("!").ids[0]
    async with running_front(directory, says("ok!")) as front:
        stopping = gpb.StoppingParams(max_tokens=50, stop_token_ids=[stop])
        answer = await stub(front).Generate(request(stopping=stopping))
        assert answer.choices[0].text == "ok" and answer.choices[0].stop_match.token_id == stop
        assert answer.usage.completion_tokens == 3
        stopping.include_stop_in_output = True
        assert (await stub(front).Generate(request(stopping=stopping))).choices[0].text == "ok!"


async def test_several_choices_have_seeds_of_their_own_and_deltas_their_index(directory: Path) -> None:
    sampling = gpb.SamplingParams(n=3, seed=11)
    async with running_front(directory, lambda prompt, params, index: params.seed % 200) as front:
        asked = request(sampling=sampling, output=gpb.OutputOptions(return_token_ids=True))
        answer = await stub(front).Generate(asked)
        firsts = [choice.token_ids[0] for choice in answer.choices]
        assert len(set(firsts)) == 3 and firsts[0] == 11
        assert answer.usage.completion_tokens == 24 and answer.usage.prompt_tokens == 1
        events = await collect(front, asked)
        assert events[0].started.seed == 11
        for index, choice in enumerate(answer.choices):
            ids = [each for event in events if event.delta.index == index for each in event.delta.token_ids]
            assert ids == list(choice.token_ids)


async def test_logprobs_and_prompt_logprobs_reach_the_client(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        output = gpb.OutputOptions(return_token_ids=True, logprobs=0, prompt_logprobs=0)
        asked = request("xy", output=output)
        answer = await stub(front).Generate(asked)
        choice = answer.choices[0]
        assert [each.token_id for each in choice.logprobs] == list(choice.token_ids)
        assert choice.logprobs[0].logprob == logprob_of(choice.token_ids[0]).logprob
        assert [each.token_id for each in answer.prompt_logprobs] == front.encode("xy")
        assert len((await collect(front, asked))[0].started.prompt_logprobs) == 2


async def test_the_prompt_is_echoed_when_asked(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        output = gpb.OutputOptions(return_text=True, return_token_ids=True, echo_prompt=True)
        choice = (await stub(front).Generate(request("hello ", output=output))).choices[0]
        assert choice.text == "hello abcabcab"
        assert list(choice.token_ids[:-8]) == front.encode("hello ")


async def test_a_resumed_answer_goes_on_where_the_first_one_broke_off(directory: Path) -> None:
    text = "naïve café ✓ and so on "
    async with running_front(directory, says(text)) as front:
        asked = request(
            sampling=gpb.SamplingParams(seed=4),
            output=gpb.OutputOptions(return_text=True, return_token_ids=True),
            stopping=gpb.StoppingParams(max_tokens=30, stop=["on "]),
        )
        whole = await collect(front, asked)
        deltas = [event.delta for event in whole if event.HasField("delta")]
        full = "".join(delta.text for delta in deltas)
        for cut in range(1, len(deltas) - 1):
            held = [each for delta in deltas[:cut] for each in delta.token_ids]
            shown = "".join(delta.text for delta in deltas[:cut])
            asked.resume.CopyFrom(gpb.TokenIds(ids=held))
            rest = (await stub(front).Generate(asked)).choices[0]
            assert shown + rest.text == full
            assert held + list(rest.token_ids) == [each for delta in deltas for each in delta.token_ids]


async def test_chat_goes_through_the_template(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        chat = gpb.ChatPrompt(messages_json='[{"role": "user", "content": [{"type": "text", "text": "hé"}]}]')
        await stub(front).Generate(gpb.GenerateRequest(chat=chat, stopping=gpb.StoppingParams(max_tokens=1)))
        start = front.workers.sent[0].command
        assert isinstance(start, PrefillStart)
        text = front.model.tokenizer.decode(start.token_ids, keep_special_tokens=True)
        assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"


async def test_larger_chunks_are_fewer_and_none_waits_longer_than_its_delay(directory: Path) -> None:
    async with running_front(directory, says("abc"), step_seconds=0.002) as front:
        asked = request(stopping=gpb.StoppingParams(max_tokens=33), output=gpb.OutputOptions(return_token_ids=True))
        sizes = [len(e.delta.token_ids) for e in await collect(front, asked, min_tokens_per_chunk=16)][1:-1]
        assert sum(sizes) == 33 and len(sizes) <= 4
    async with running_front(directory, says("abc"), step_seconds=0.02) as front:
        knobs = gpb.GenerateStreamRequest(request=asked, min_tokens_per_chunk=1000)
        knobs.max_chunk_delay.FromMilliseconds(50)
        sizes = [len(each.delta.token_ids) async for each in stub(front).GenerateStream(knobs)][1:-1]
        assert sum(sizes) == 33 and len(sizes) >= 3


async def test_a_chunk_may_be_larger_than_its_window_and_take_longer_than_a_slow_client(directory: Path) -> None:
    config = RouterConfig(credit_window=8, slow_client=0.3)
    async with running_front(directory, says("abc"), config=config) as front:
        asked = request(stopping=gpb.StoppingParams(max_tokens=64), output=gpb.OutputOptions(return_token_ids=True))
        knobs = gpb.GenerateStreamRequest(request=asked, min_tokens_per_chunk=40)
        knobs.max_chunk_delay.FromMilliseconds(20_000)
        sizes = [len(each.delta.token_ids) async for each in stub(front).GenerateStream(knobs)][1:-1]
        assert sum(sizes) == 64 and len(sizes) <= 3, sizes


async def test_choices_that_wait_for_the_logprobs_of_the_prompt_are_not_slow(directory: Path) -> None:
    """Choice 0 brings them; the other one has read its window long before, and its client cannot have."""
    config = RouterConfig(credit_window=8, slow_client=0.3)
    async with running_front(directory, says("abc"), config=config) as front:
        tell, loop = front.workers._command, asyncio.get_running_loop()

        def late(driver: Any, action: Any) -> None:
            computes = isinstance(action.command, PrefillStart) and action.command.params.prompt_logprobs is not None
            loop.call_later(1.0 if computes else 0.0, tell, driver, action)

        front.workers._command = late  # type: ignore[method-assign]
        asked = request(
            sampling=gpb.SamplingParams(n=2),
            stopping=gpb.StoppingParams(max_tokens=32),
            output=gpb.OutputOptions(return_token_ids=True, prompt_logprobs=0),
        )
        events = await collect(front, asked)
        assert len(events[0].started.prompt_logprobs) > 0
        for index in range(2):
            assert sum(len(each.delta.token_ids) for each in events if each.delta.index == index) == 32


class DeafContext:
    """A client that never takes the second message."""

    def __init__(self) -> None:
        self.written: list[gpb.GenerateStreamResponse] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def write(self, message: gpb.GenerateStreamResponse) -> None:
        if self.written:
            await asyncio.Event().wait()
        self.written.append(message)


async def test_a_client_that_does_not_read_holds_its_own_request_back(directory: Path) -> None:
    async with running_front(directory, says("abc"), config=RouterConfig(credit_window=8)) as front:
        asked = gpb.GenerateStreamRequest(request=request(stopping=gpb.StoppingParams(max_tokens=400)))
        reading = asyncio.create_task(front.service.GenerateStream(asked, DeafContext()))  # type: ignore[arg-type]
        await until(lambda: bool(front.workers.jobs))
        (job,) = front.workers.jobs.values()
        await asyncio.sleep(0.2)
        assert job.index == job.until_index == 8
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_credit_comes_back_as_the_client_reads(directory: Path) -> None:
    async with running_front(directory, says("abc"), config=RouterConfig(credit_window=8)) as front:
        asked = request(stopping=gpb.StoppingParams(max_tokens=64), output=gpb.OutputOptions(return_token_ids=True))
        assert len((await stub(front).Generate(asked)).choices[0].token_ids) == 64
        assert sum(len(event.delta.token_ids) for event in await collect(front, asked)) == 64


# ---- text and server ----------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize_are_inverse(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        ids = await stub(front).Tokenize(gpb.TokenizeRequest(text="hello wörld ✓"))
        assert ids.max_model_len == 512
        back = await stub(front).Detokenize(gpb.DetokenizeRequest(token_ids=ids.token_ids))
        assert back.text == "hello wörld ✓"


async def test_models_and_workers_are_listed(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        models = (await stub(front).ListModels(gpb.ListModelsRequest())).models
        assert [(each.id, each.max_model_len) for each in models] == [("tiny", 512), ("tiny-alias", 512)]
        info = await stub(front).GetServerInfo(gpb.GetServerInfoRequest())
        assert (info.prefill_workers, info.decode_workers) == (1, 1) and info.uptime.nanos > 0
        assert {worker.role for worker in info.workers} == {"prefill", "decode"}
        assert all(worker.accepting and worker.total_blocks == HELLO.total_blocks for worker in info.workers)


# ---- ends ---------------------------------------------------------------------------------------------------------


async def test_a_deadline_ends_the_call_and_the_work(directory: Path) -> None:
    async with running_front(directory, says("abc"), held=True) as front:
        error = await failure(stub(front).Generate(request(), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: front.driver.dispatcher.idle)
        assert front.workers.cancelled


async def test_the_default_deadline_counts_where_the_client_sets_none(directory: Path) -> None:
    async with running_front(directory, says("abc"), held=True, deadlines=Deadlines(0.2, 1.0)) as front:
        error = await failure(stub(front).Generate(request()))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "deadline of 0.2 s" in (error.details() or "")
        assert details(error, error_details_pb2.ErrorInfo).metadata["tokens_emitted"] == "0"


@pytest.mark.parametrize("held", [True, False])
async def test_a_client_that_leaves_frees_the_workers_at_once(directory: Path, held: bool) -> None:
    async with running_front(directory, says("abc"), held=held, step_seconds=0.01) as front:
        asked = request(stopping=gpb.StoppingParams(max_tokens=400))
        call = stub(front).GenerateStream(gpb.GenerateStreamRequest(request=asked))
        reading = asyncio.create_task(call.read())
        await until(lambda: bool(front.workers.jobs or front.workers.sent))
        if not held:
            await reading
        call.cancel()
        await until(lambda: front.driver.dispatcher.idle, 0.5)
        await until(lambda: bool(front.workers.cancelled), 0.5)
        await asyncio.gather(reading, return_exceptions=True)


class Noted(Off):
    """Keeps how each span ended."""

    on = True

    def __init__(self) -> None:
        self.errors: list[str] = []

    def begin(self, name: str, incoming: Incoming, attributes: Any) -> Any:
        noted = self

        class Open:
            traceparent = ""

            def end(self, attributes: Any, error: str = "") -> None:
                noted.errors.append(error)

        return Open()


async def test_a_client_that_leaves_before_its_prompt_is_tokens_leaves_a_span(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_front(directory, says("abc")) as front:
        begun, noted = asyncio.Event(), Noted()

        async def never(text: str, add_special_tokens: bool) -> Any:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(front.core, "_tracing", noted)
        monkeypatch.setattr(front.model, "encode_text", never)
        call = stub(front).Generate(request())
        await begun.wait()
        call.cancel()
        await until(lambda: noted.errors == ["CANCELLED"])


async def test_a_storm_of_clients_that_leave_leaves_nothing_behind(directory: Path) -> None:
    rng = random.Random(3)

    async def one(front: Front) -> None:
        asked = request(stopping=gpb.StoppingParams(max_tokens=100), sampling=gpb.SamplingParams(n=rng.randint(1, 3)))
        call = stub(front).GenerateStream(gpb.GenerateStreamRequest(request=asked))
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(rng.random() * 0.3):
                while await call.read() is not grpc.aio.EOF:
                    pass
        call.cancel()

    config = RouterConfig(max_concurrent_requests=20, max_queued_requests=500)
    async with running_front(directory, says("abc"), step_seconds=0.002, config=config) as front:
        await asyncio.gather(*(one(front) for _ in range(80)))
        await until(lambda: front.driver.dispatcher.idle and front.workers.inbox.empty())
        await until(lambda: not front.workers.jobs)


async def test_a_stream_that_fails_gives_its_tokens_first_and_says_that_it_can_resume(directory: Path) -> None:
    async with running_front(
        directory, says("abc"), step_seconds=0.01, config=RouterConfig(restart_grace=0.1, no_worker_grace=0.1)
    ) as front:
        asked = request(stopping=gpb.StoppingParams(max_tokens=400), output=gpb.OutputOptions(return_token_ids=True))
        call = stub(front).GenerateStream(gpb.GenerateStreamRequest(request=asked))
        got: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                got += event.delta.token_ids
                if len(got) == 5:
                    for role in Role:
                        front.driver.worker_down("fake:1", role)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        info = details(caught.value, error_details_pb2.ErrorInfo)
        assert info.metadata["resumable"] == "true" and info.metadata["tokens_emitted"] == str(len(got))


async def test_without_workers_the_call_says_which_are_missing(directory: Path) -> None:
    async with running_front(directory, says("abc"), up=False, config=RouterConfig(no_worker_grace=0.1)) as front:
        error = await failure(stub(front).Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "no prefill worker is up" in (error.details() or "")
        assert details(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1


async def test_a_full_router_refuses_with_numbers_and_a_retry_hint(directory: Path) -> None:
    config = RouterConfig(max_concurrent_requests=1, max_queued_requests=0)
    async with running_front(directory, says("abc"), held=True, config=config) as front:
        running = asyncio.ensure_future(stub(front).Generate(request(), timeout=5))
        await until(lambda: bool(front.driver.dispatcher.flows))
        error = await failure(stub(front).Generate(request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 running and" in (error.details() or "")
        assert details(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_of_several_choices_all_are_admitted_or_none_stays(directory: Path) -> None:
    config = RouterConfig(max_concurrent_requests=1, max_queued_requests=1)
    async with running_front(directory, says("abc"), config=config) as front:
        error = await failure(stub(front).Generate(request(sampling=gpb.SamplingParams(n=3))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: front.driver.dispatcher.idle)


# ---- bad input ----------------------------------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        error = await failure(stub(front).Generate(gpb.GenerateRequest(text="x" * 600)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        for number in ("600", "512", "511"):
            assert number in (error.details() or "")


async def test_an_unknown_model_lists_what_is_served(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        error = await failure(stub(front).Generate(request(model="gpt-9")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "'gpt-9'" in (error.details() or "") and "tiny, tiny-alias" in (error.details() or "")
        assert (await stub(front).Generate(request(model="tiny-alias"))).model == "tiny"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (gpb.GenerateRequest(text=""), "text"),
        (gpb.GenerateRequest(), "prompt"),
        (gpb.GenerateRequest(token_ids=gpb.TokenIds()), "token_ids"),
        (gpb.GenerateRequest(token_ids=gpb.TokenIds(ids=[9999])), "token_ids"),
        (request(sampling=gpb.SamplingParams(temperature=11)), "sampling.temperature"),
        (request(stopping=gpb.StoppingParams(max_tokens=0)), "stopping.max_tokens"),
        (request(output=gpb.OutputOptions(logprobs=21)), "output.logprobs"),
        (gpb.GenerateRequest(chat=gpb.ChatPrompt(messages_json="{")), "chat.messages_json"),
        (gpb.GenerateRequest(chat=gpb.ChatPrompt(messages_json='[{"role": "tool", "content": ""}]')), "chat"),
        (gpb.GenerateRequest(chat=gpb.ChatPrompt(messages_json='[{"role":"user","content":"\\ud800"}]')), "chat"),
    ],
)
async def test_a_bad_field_is_named(directory: Path, wrong: gpb.GenerateRequest, field: str) -> None:
    async with running_front(directory, says("abc")) as front:
        error = await failure(stub(front).Generate(wrong))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and bad_field(error) == field
        assert (error.details() or "").count("\n") == 0 and not front.workers.sent


async def test_prompt_logprobs_that_no_message_can_hold_are_refused_with_the_largest_prompt(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        asked = gpb.GenerateRequest(text="x" * 10_000, output=gpb.OutputOptions(prompt_logprobs=20))
        error = await failure(stub(front).Generate(asked))
        assert bad_field(error) == "output.prompt_logprobs" and "at most 9523 fit" in (error.details() or "")


async def test_a_text_too_large_to_tokenize_is_refused_with_both_sizes(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        error = await failure(stub(front).Generate(gpb.GenerateRequest(text="x" * 2_000_000)))
        assert bad_field(error) == "text" and "at most 1048576 bytes, got 2000000" in (error.details() or "")


async def test_a_worker_that_breaks_gives_an_error_id_that_the_log_explains(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_front(directory, says("abc"), held=True) as front:
        call = asyncio.ensure_future(stub(front).Generate(request()))
        await until(lambda: bool(front.workers.sent))
        key = front.workers.sent[0].command.key  # type: ignore[union-attr]
        front.driver.worker_event("fake:1", Role.PREFILL, Failed(key, Reason.INTERNAL, resumable=False))
        error = await failure(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        error_id = details(error, error_details_pb2.ErrorInfo).metadata["error_id"]
    said = capfd.readouterr()
    assert error_id in (error.details() or "") and error_id in said.out + said.err


async def test_a_field_whose_feature_is_not_built_is_unimplemented(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front:
        error = await failure(stub(front).Generate(request(constraint=gpb.Constraint(regex="a+"))))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED and "constraint.regex" in (error.details() or "")


async def test_bytes_that_are_no_request_are_the_clients_fault(directory: Path) -> None:
    not_utf8 = request("abc").SerializeToString().replace(b"abc", b"a\xffc")
    async with running_front(directory, says("abc")) as front:
        for data in (not_utf8, b"\xff\xff\xff"):
            call = front.channel.unary_unary("/pagewire.v1.GenerationService/Generate")
            error = await failure(call(data))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "UTF-8" in (error.details() or "")


async def test_what_nobody_foresaw_is_internal_with_an_id_and_no_traceback(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_front(directory, says("abc")) as front:
        monkeypatch.setattr(front.model, "tokenizer", None)
        error = await failure(stub(front).Generate(request()))
        assert error.code() is grpc.StatusCode.INTERNAL and "Error" not in (error.details() or "")
        error_id = details(error, error_details_pb2.ErrorInfo).metadata["error_id"]
        assert error_id in (error.details() or "")
    said = capfd.readouterr()
    assert error_id in said.out + said.err
