"""The HTTP door as its clients meet it: the openai package on real processes, raw bodies, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
from cluster import Cluster
from kill_workers import all_idle
from router_front import Front, make_model_dir, make_tokenizer, running_front, until

from engine.messages import Failed, PrefillStart, Reason
from engine.types import SamplingParams
from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc
from router import patience
from router.admission import RouterConfig
from router.openai.app import build_app
from router.openai.border import MAX_BODY_BYTES
from router.workers import Role
from wire.http import serve
from wire.ports import listen
from wire.security import Security

ENCODED = make_tokenizer()
HELLO: Any = [{"role": "user", "content": "hello"}]
MODEL = "random:tiny"
PLAIN = Security()
TLS = Path(__file__).parent / "tls"
Script = Callable[[Sequence[int], SamplingParams, int], int]


def says(text: str) -> Script:
    """Workers that answer every prompt with this text, over and over."""
    ids = ENCODED.encode(text, add_special_tokens=False).ids
    return lambda prompt, params, index: ids[index % len(ids)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.topology.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def raw(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.topology.url, timeout=30) as client:
        yield client


@contextlib.asynccontextmanager
async def door(
    front: Front,
    key: str | None = None,
    security: Security = PLAIN,
    trust: ssl.SSLContext | None = None,
    buffer: int | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP door of this front, on a port of its own. `buffer`: bytes that the kernel keeps for a connection."""
    http = listen("127.0.0.1", 0, security)
    if buffer is not None:
        http.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    app = build_app(front.core, front.core.workers.ready, front.counts.registry, key)
    task = asyncio.create_task(serve(app, http, security))
    try:
        url = f"{'https' if trust else 'http'}://127.0.0.1:{http.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=10, verify=trust or True) as client:
            yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        http.close()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Every refusal has this body, and no other."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error: dict[str, Any] = body["error"]
    return error


def events(text: str) -> list[Any]:
    """The data of a stream that ended as it must."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


# ---- the openai package -------------------------------------------------------------------------------------------


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
    assert whole.usage and whole.usage.completion_tokens == 12 and whole.usage.total_tokens > 12
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(each.delta.content or "" for each in deltas) == choice.message.content
    assert deltas[0].delta.role == "assistant" and deltas[0].delta.content, "no bare role before the first token"
    assert [each.finish_reason for each in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 12 and all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.object == "chat.completion" and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_without_being_asked_for_no_usage_chunk_comes(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_a_seed_gives_the_same_choices_again_and_n_gives_different_ones(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "seed": 7, "n": 3}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and cut.text == text[: text.index(stop)]
    assert client.completions.create(**asked, stop=None).choices[0].text == text


def test_logprobs_of_a_chat_name_each_token_with_the_best(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token, "the likeliest was taken"


def test_several_prompts_give_their_choices_in_order_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0, "logprobs": 1}
    alone = [client.completions.create(**asked, prompt=prompt).choices[0].text for prompt in ("abc", "xyz")]
    both = client.completions.create(**asked, prompt=["abc", "xyz"])
    assert [choice.text for choice in both.choices] == alone and both.usage and both.usage.completion_tokens == 10
    logprobs = both.choices[1].logprobs
    assert logprobs and logprobs.tokens and logprobs.text_offset and len(logprobs.tokens) == 5
    texts = ["", ""]
    for chunk in client.completions.create(**asked, prompt=["abc", "xyz"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == alone


def test_a_prompt_may_be_token_ids_and_its_echo_comes_first(client: openai.OpenAI, raw: httpx.Client) -> None:
    ids = raw.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    answer = client.completions.create(**asked, prompt=ids, echo=True).choices[0].text
    assert answer == "abc" + client.completions.create(**asked, prompt="abc").choices[0].text


def test_errors_are_the_exceptions_that_its_users_know(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert unknown.value.code == "model_not_found" and MODEL in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=11)
    assert hot.value.param == "temperature" and "[0, 10], got 11" in str(hot.value)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100_000, stream=True)
    assert long.value.code == "context_length_exceeded" and long.value.param == "max_tokens"


async def test_a_stream_that_is_left_gives_its_blocks_back(client: openai.OpenAI, cluster: Cluster) -> None:
    def read_a_little() -> None:
        with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4000, stream=True) as stream:
            for _, _ in zip(range(3), stream, strict=False):
                pass

    await asyncio.to_thread(read_a_little)
    assert await all_idle(cluster, 3.0) == ""
    assert cluster.tracebacks("router") == []


def test_a_whole_answer_says_how_long_it_is_and_what_a_stop_string_took(raw: httpx.Client) -> None:
    asked = {"prompt": "abc", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    text = raw.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    answer = raw.post("/v1/completions", json={**asked, "stop": text[len(text) // 2 :][:3]})
    assert int(answer.headers["content-length"]) == len(answer.content)
    told = answer.json()
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["pagewire"]["decode_ms"] > 0 and told["pagewire"]["kv_transfer_ms"] > 0


def test_models_name_what_is_served(client: openai.OpenAI, raw: httpx.Client) -> None:
    assert raw.get("/v1/models/").json() == raw.get("/v1/models").json()
    (card,) = client.models.list().data
    assert card.id == MODEL and card.object == "model"
    assert client.models.retrieve(MODEL) == card
    assert raw.get(f"/v1/models/{MODEL}").json()["max_model_len"] > 0


def test_the_curl_line_of_the_readme_is_answered(cluster: Cluster) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    (line,) = re.findall(r"^curl (?:.*\\\n)*.*$", readme, re.MULTILINE)
    here = line.replace("http://127.0.0.1:8000", cluster.topology.url)
    assert here != line, "it goes to the router's default port"
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and 1 <= answer["usage"]["completion_tokens"] <= 16
    assert choice["finish_reason"] in ("length", "stop")
    assert choice["message"]["content"] or choice["finish_reason"] == "stop"  # random weights may end at once


# ---- bodies that no client library sends --------------------------------------------------------------------------


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2, **fields}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "[1, 2147483647], got 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be in [1, 2147483647]"),
        ({"max_tokens": 10**300}, "max_tokens", "must be in [1, 2147483647]"),
        ({"top_p": 0}, "top_p", "(0, 1], got 0"),
        ({"n": 17}, "n", "[1, 16], got 17"),
        ({"seed": -1}, "seed", "[0, 18446744073709551615]"),
        ({"stop": 5}, "stop", "valid string or:"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 entries, got 17"),
        ({"logit_bias": {"cat": 1}}, "logit_bias", "'cat' is no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "[-100, 100]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "[0, 2147483647], got -1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be in [0, 20], got 21"),
        ({"max_tokens": 10**6}, "max_tokens", "and max_tokens is 1000000, but"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "and max_completion_tokens is 1000000, but"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "roles are system"),
        ({"messages": None}, "messages", "valid list"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "may not set 'messages'"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 bytes, got 257"),
        ({"tools": [{"type": "function"}]}, "tools", "tool calling is not built"),
        ({"response_format": {"type": "json_object"}}, "response_format", "constrained output is not built"),
        ({"best_of": 2}, "best_of", "not built"),
        ({"priority": 3}, "priority", "not built"),
    ],
)
def test_a_wrong_field_is_named_with_its_range(
    raw: httpx.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = raw.post("/v1/chat/completions", json=chat(**fields))
    error = error_of(answer)
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"], error


def test_unknown_fields_and_values_that_ask_for_nothing_are_accepted(raw: httpx.Client) -> None:
    harmless = {
        "brand_new": [1], "user": "me", "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "best_of": 1, "priority": 0, "stop": None, "top_k": -1, "functions": None, "parallel_tool_calls": True,
    }  # fmt: skip
    answer = raw.post("/v1/chat/completions", json=chat(**harmless), headers={"X-Request-Id": "mine-1"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "chatcmpl-mine-1"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"messages": [', 400, "bad_json"),
        (b"[" * 100_000, 400, "bad_json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": ' + b"9" * 5000 + b"}", 400, "bad_json"),
        (b"[]", 400, "invalid_argument"),
        (b"", 400, "invalid_argument"),
        (b"\xff\xfe{", 400, "bad_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_argument"),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', 404, "model_not_found"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "body_too_large"),
    ],
)
def test_what_is_no_request_is_refused_in_the_same_shape(
    raw: httpx.Client, body: bytes, status: int, code: str
) -> None:
    answer = raw.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_a_body_that_does_not_say_its_size_is_cut_off_at_the_limit(raw: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    answer = raw.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "at most 8388608 bytes" in error_of(answer)["message"]


def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_shape(raw: httpx.Client) -> None:
    assert error_of(raw.get("/v1/nothing"))["message"] == "there is no GET /v1/nothing here"
    wrong = raw.get("/v1/chat/completions")
    assert wrong.status_code == 405 and "not allowed" in error_of(wrong)["message"]


def test_text_becomes_tokens_and_text_again(raw: httpx.Client) -> None:
    for prefix in ("", "/v1"):
        tokens = raw.post(f"{prefix}/tokenize", json={"prompt": "hello"}).json()
        assert tokens["count"] == len(tokens["tokens"]) > 0 and tokens["max_model_len"] > 0
        assert raw.post(f"{prefix}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "hello"}
    assert raw.post("/tokenize", json={"messages": HELLO}).json()["count"] > tokens["count"]
    assert error_of(raw.post("/detokenize", json={"tokens": [10**6]}))["param"] == "tokens"
    assert error_of(raw.post("/tokenize", json={}))["param"] == "prompt"


def test_metrics_count_what_was_served(raw: httpx.Client, cluster: Cluster) -> None:
    def value(name: str) -> float:
        lines = raw.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = {
        "pagewire_generation_tokens_total": 5, "pagewire_time_to_first_token_seconds_count": 1,
        "pagewire_e2e_request_latency_seconds_count": 1, "pagewire_inter_token_latency_seconds_count": 4,
        "pagewire_request_queue_time_seconds_count": 1, "pagewire_router_picks_total": 2,
        'pagewire_requests_finished_total{reason="length",role="router"}': 1,
    }  # fmt: skip
    before = {name: value(name) for name in names}
    assert raw.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True}).status_code == 200
    assert {name: value(name) - before[name] for name in names} == names
    assert value("pagewire_worker_up") == 2 and value("pagewire_requests_running") == 0
    assert f'worker="{cluster.programs["decode-1"].address}"' in raw.get("/metrics").text


def test_health_and_version(raw: httpx.Client) -> None:
    assert [(raw.get(path).status_code, raw.get(path).content) for path in ("/health", "/ping")] == [(200, b"")] * 2
    for path in ("/health", "/v1/models", "/metrics"):
        asked = raw.head(path)
        assert asked.status_code == 200 and asked.content == b"", "a probe may ask without wanting a body"
    assert raw.get("/version").json()["version"]


# ---- what a cluster does not do on demand -------------------------------------------------------------------------


async def test_nothing_but_health_answers_without_the_key(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front, door(front, "s3cret") as http:
        for path in ("/v1/models", "/metrics", "/version", "/tokenize", "/openapi.json", "/nothing"):
            for header in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
                answer = await http.get(path, headers=header)
                assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key", path
        assert (await http.get("/health")).status_code == (await http.get("/ping")).status_code == 200
        assert (await http.get("/v1/models", headers={"Authorization": "Bearer s3cret"})).status_code == 200


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_workers_at_once(directory: Path, held: bool, stream: bool) -> None:
    """Before its first token and in the middle, with a stream and while it waits for the whole."""
    script = says("abc")
    async with running_front(directory, script, held=held, step_seconds=0.02) as front, door(front) as http:
        asked = {"prompt": "x", "max_tokens": 400, "stream": stream}
        call = asyncio.create_task(http.post("/v1/completions", json=asked))
        await until(lambda: bool(front.workers.prompts))
        await asyncio.sleep(0.1)
        assert not front.workers.cancelled
        call.cancel()
        began = time.monotonic()
        await until(lambda: len(front.workers.cancelled) > 0)
        assert time.monotonic() - began < 0.5
        await until(lambda: front.driver.dispatcher.idle)
        assert 'finished_total{reason="cancelled",role="router"} 1.0' in (await http.get("/metrics")).text


async def test_a_failure_in_the_middle_of_a_stream_is_an_event_and_then_done(directory: Path) -> None:
    async with running_front(directory, says("abc"), step_seconds=0.02) as front, door(front) as http:
        asked = {"prompt": "x", "max_tokens": 400, "stream": True}
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            text = ""
            async for part in answer.aiter_text():
                text += part
                front.driver.hand_back()
        *chunks, last = events(text)
        assert answer.status_code == 200 and chunks
        assert last["error"]["type"] == "service_unavailable" and "shutting down" in last["error"]["message"]


async def test_a_failure_before_the_first_token_is_a_status(directory: Path) -> None:
    async with running_front(directory, says("abc"), held=True) as front, door(front) as http:
        call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "stream": True}))
        await until(lambda: bool(front.workers.prompts))
        start = next(each.command for each in front.workers.sent if isinstance(each.command, PrefillStart))
        front.driver.worker_event("fake:1", Role.PREFILL, Failed(start.key, Reason.INTERNAL, resumable=False))
        answer = await call
        assert answer.status_code == 500 and error_of(answer)["type"] == "server_error"


async def test_a_full_router_says_429_and_when_to_come_back(directory: Path) -> None:
    config = RouterConfig(max_concurrent_requests=1, max_queued_requests=0)
    async with running_front(directory, says("abc"), held=True, config=config) as front, door(front) as http:
        first = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: bool(front.workers.prompts))
        refused = await http.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert error_of(refused)["type"] == "rate_limit_error"
        first.cancel()
        await until(lambda: front.driver.dispatcher.idle)


async def test_what_a_field_says_wrong_is_counted_as_a_refusal_at_either_door(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front, door(front) as http:
        assert (await http.post("/v1/chat/completions", json=chat(max_tokens=0))).status_code == 400
        assert (await http.post("/v1/completions", json={"prompt": "x", "temperature": 99})).status_code == 400
        with pytest.raises(grpc.aio.AioRpcError):
            wrong = gpb.GenerateRequest(text="x", stopping=gpb.StoppingParams(max_tokens=0))
            await generation_pb2_grpc.GenerationServiceStub(front.channel).Generate(wrong)
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        labels = {"role": "router", "code": "invalid_argument"}
        assert front.counts.registry.get_sample_value("pagewire_requests_refused_total", labels) == 3


async def test_what_cannot_be_read_is_counted_as_a_refusal_at_either_door(directory: Path) -> None:
    async with running_front(directory, says("abc")) as front, door(front) as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await http.post(path, json={"prompt": {"x": 1}, "messages": 7})).status_code == 400
            assert (await http.post(path, content=b'{"prompt": ')).status_code == 400
            assert (await http.post(path, content=b"x" * (MAX_BODY_BYTES + 1))).status_code == 413
        assert (await http.post("/tokenize", json={"prompt": 7})).status_code == 400, "it would generate nothing"
        assert (await http.get("/v1/completions")).status_code == 405, "it asks for nothing"
        for method, count in (("Generate", 1), ("Tokenize", 0)):
            before = refusals(front)
            call = front.channel.unary_unary(f"/pagewire.v1.GenerationService/{method}")
            with pytest.raises(grpc.aio.AioRpcError, match="is no "):
                await call(b"\xff\xff")
            assert refusals(front) == before + count
        assert refusals(front) == 7


def refusals(front: Front) -> float:
    labels = {"role": "router", "code": "invalid_argument"}
    return front.counts.registry.get_sample_value("pagewire_requests_refused_total", labels) or 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_no_tokens_is_the_prompt_alone(directory: Path, stream: bool) -> None:
    async with running_front(directory, says("abc")) as front, door(front) as http:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        asked = {"prompt": "hello w", "echo": True, "max_tokens": 0, "logprobs": 0, "n": 2, "stream": stream, **options}
        answer = await http.post("/v1/completions", json=asked)
        told = events(answer.text) if stream else [answer.json()]
        choices = [choice for each in told for choice in each["choices"]]
        assert [choice["text"] for choice in choices] == ["hello w"] * 2
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        tokens = front.encode("hello w")
        assert told[-1]["usage"]["prompt_tokens"] == len(tokens) and told[-1]["usage"]["completion_tokens"] == 0
        lists = choices[0]["logprobs"]
        assert "".join(lists["tokens"]) == "hello w" and len(lists["token_logprobs"]) == len(tokens)
        for wrong in ({"echo": False}, {"echo": True, "min_tokens": 1}):
            refused = await http.post("/v1/completions", json={**asked, **wrong})
            assert refused.status_code == 400 and "tokens" in error_of(refused)["param"]


async def test_text_that_may_become_a_stop_string_is_held_back_and_logprobs_are_not_lost(directory: Path) -> None:
    async with running_front(directory, says("abcabd")) as front, door(front) as http:
        asked = {"prompt": "x", "max_tokens": 40, "stop": "abd", "stream": True, "return_token_ids": True}
        chunks = [each["choices"][0] for each in events((await http.post("/v1/completions", json=asked)).text)]
        assert "".join(each["text"] for each in chunks) == "abc" and chunks[-1]["finish_reason"] == "stop"
        assert sum(len(each["token_ids"]) for each in chunks) == 6


async def test_continuous_usage_is_on_every_chunk(directory: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_front(directory, says("abc")) as front, door(front) as http:
        asked = chat(max_tokens=5, stream=True, stream_options=options)
        *chunks, last = events((await http.post("/v1/chat/completions", json=asked)).text)
        counts = [each["usage"]["completion_tokens"] for each in chunks]
        assert counts == sorted(counts) and counts[0] >= 1 and last["usage"]["completion_tokens"] == 5
        assert last["choices"] == []


@pytest.mark.parametrize("shows", [True, False])
async def test_with_certificates_it_speaks_https_to_who_shows_one_and_to_nobody_else(
    directory: Path, shows: bool
) -> None:
    mutual = Security(cert=TLS / "host.pem", key=TLS / "host.key", ca=TLS / "ca.pem")
    trust = ssl.create_default_context(cafile=TLS / "ca.pem")
    if shows:
        trust.load_cert_chain(TLS / "host.pem", TLS / "host.key")
    async with running_front(directory, says("abc")) as front, door(front, "k", mutual, trust) as https:
        asked = {"prompt": "x", "max_tokens": 3, "stream": True}
        if not shows:
            with pytest.raises(httpx.TransportError):
                await https.get("/health")
            return
        assert (await https.get("/health")).status_code == 200
        assert (await https.post("/v1/completions", json=asked)).status_code == 401, "a certificate is no key"
        answer = await https.post("/v1/completions", json=asked, headers={"Authorization": "Bearer k"})
        assert "".join(each["choices"][0]["text"] for each in events(answer.text)) == "abc"
        with pytest.raises(httpx.TransportError):  # whoever speaks plain HTTP to it
            await https.get(f"http://{https.base_url.host}:{https.base_url.port}/health")


def asks_and_reads_nothing(http: httpx.AsyncClient) -> socket.socket:
    """With a long name in every chunk the answer is larger than all that anybody keeps for a connection."""
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect(("127.0.0.1", http.base_url.port))
    body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True, "logprobs": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {'n' * 128}\r\nContent-Length: {len(body)}"
    lazy.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
    return lazy


async def test_a_client_that_reads_nothing_loses_its_request_and_slows_nobody(directory: Path) -> None:
    config = RouterConfig(slow_client=0.5)
    async with (
        running_front(directory, says("abc"), config=config, step_seconds=0.001) as front,
        door(front, buffer=8192) as http,
    ):
        lazy = asks_and_reads_nothing(http)
        await until(lambda: bool(front.workers.prompts))
        began = time.monotonic()
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})).status_code == 200
        assert time.monotonic() - began < 1.0
        await until(lambda: front.driver.dispatcher.idle, 10.0)
        assert front.driver.dispatcher.ended == {"OK": 1, "RESOURCE_EXHAUSTED": 1}
        lazy.close()


async def test_the_connection_of_a_client_that_reads_nothing_is_cut_without_a_traceback(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(patience, "MOST_WRITE_S", 0.4)
    async with running_front(directory, says("abc"), step_seconds=0.001) as front, door(front, buffer=8192) as http:
        lazy = asks_and_reads_nothing(http)
        await until(lambda: bool(front.workers.prompts))
        await until(lambda: front.driver.dispatcher.idle, 10.0)
        peer = lazy.getsockname()
        held = psutil.Process().net_connections("tcp")
        assert not [each for each in held if each.raddr == peer], "nothing is kept for it"
        lazy.close()
        told = caplog.text + "".join(capsys.readouterr())
        assert "Traceback" not in told and "ASGI" not in told and "read nothing for 0.4 s" in told


async def test_without_workers_it_is_not_healthy(directory: Path) -> None:
    async with running_front(directory, says("abc"), up=False) as front, door(front) as http:
        answer = await http.get("/health")
        assert answer.status_code == 503 and error_of(answer)["type"] == "service_unavailable"
