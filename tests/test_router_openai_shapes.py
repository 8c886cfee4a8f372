"""Every answer of the HTTP door is of the shape that OpenAI documents: no field is missing, of another type, or more.

Judged by the openai package's own types, strictly. Beside them an answer has `pagewire`, the times of its stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai.types as shapes
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from router_front import make_model_dir, make_tokenizer, running_front
from test_router_openai import door, events

from engine.types import Candidate, SamplingParams, TokenLogprob
from router.answer import Piece
from router.openai import schema
from router.openai.shapes import CompletionShape
from router.text.tokenizer import Tokenizer

ENCODED = make_tokenizer()
OURS = {"pagewire"}
Script = Callable[[Sequence[int], SamplingParams, int], int]


def says(text: str) -> Script:
    ids = ENCODED.encode(text, add_special_tokens=False).ids
    return lambda prompt, params, index: ids[index % len(ids)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def differences(kind: type[pydantic.BaseModel], value: Any) -> list[str]:
    """What `value` has otherwise than `kind` says; a field of another type raises."""
    read = kind.model_validate_json(json.dumps(value), strict=True)
    return list(_extra(read, kind.__name__))


def _extra(read: object, place: str) -> Iterator[str]:
    if isinstance(read, list):
        for number, each in enumerate(read):
            yield from _extra(each, f"{place}[{number}]")
    if isinstance(read, pydantic.BaseModel):
        yield from (f"{place}.{name}" for name in (read.model_extra or {}) if name not in OURS)
        for name in read.model_fields_set:
            yield from _extra(getattr(read, name), f"{place}.{name}")


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2, "seed": 7},
    "stopped": {"stop": ["two"], "max_completion_tokens": 60},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs of the chosen": {"logprobs": True},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2, "prompt": ["a", "b"]},
    "stopped": {"stop": "two", "max_tokens": 60},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_and_its_chunks_differ_in_nothing_from_what_is_documented(directory: Path, name: str) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, **CHATS[name]}
    options = {"include_usage": True, "continuous_usage_stats": name == "two"}
    async with running_front(directory, says("one two ✓ ")) as front, door(front) as http:
        whole = (await http.post("/v1/chat/completions", json=asked)).json()
        text = (await http.post("/v1/chat/completions", json={**asked, "stream": True, "stream_options": options})).text
        assert differences(ChatCompletion, whole) == []
        chunks = events(text)
        assert [difference for chunk in chunks for difference in differences(ChatCompletionChunk, chunk)] == []
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and chunks[-1]["choices"] == []
        assert all(("usage" in chunk) for chunk in chunks)


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_a_completion_and_its_chunks_differ_in_nothing_from_what_is_documented(
    directory: Path, name: str
) -> None:
    asked = {"prompt": "hello", "max_tokens": 6, **COMPLETIONS[name]}
    async with running_front(directory, says("one two ✓ ")) as front, door(front) as http:
        whole = (await http.post("/v1/completions", json=asked)).json()
        text = (await http.post("/v1/completions", json={**asked, "stream": True})).text
    assert differences(shapes.Completion, whole) == []
    for chunk in events(text):
        # A chunk's choice has no reason yet, which this type, unlike the API, has no word for.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        assert differences(shapes.Completion, chunk) == []


async def test_models_and_refusals_are_of_the_documented_shape(directory: Path) -> None:
    async with running_front(directory, says("one ")) as front, door(front) as http:
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list"
        for card in listed["data"]:
            assert set(differences(shapes.Model, card)) <= {"Model.root", "Model.parent", "Model.max_model_len"}
        error = (await http.post("/v1/completions", json={"prompt": "x", "n": 0})).json()["error"]
        assert differences(shapes.shared.ErrorObject, error) == []


def test_the_chosen_token_stands_behind_the_best_where_it_is_none_of_them() -> None:
    tokenizer = Tokenizer(make_tokenizer())
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    shape = CompletionShape(tokenizer, logprobs=True, token_ids=False, echo=False, prompt_logprobs=False)
    told = [
        TokenLogprob(a, -3.0, 3, (Candidate(b, -0.5), Candidate(c, -1.0))),
        TokenLogprob(b, -0.5, 1, (Candidate(b, -0.5), Candidate(c, -1.0))),
    ]
    choice = shape.choice(0, Piece("ab", [a, b], told))
    assert choice["logprobs"]["top_logprobs"] == [{"b": -0.5, "c": -1.0, "a": -3.0}, {"b": -0.5, "c": -1.0}]


# ---- logprobs of the prompt ---------------------------------------------------------------------------------------


def of_choice(chunks: Sequence[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


async def test_an_echo_has_the_logprobs_of_the_prompt_before_those_of_the_answer(directory: Path) -> None:
    asked: dict[str, Any] = {"prompt": "hello w", "max_tokens": 4, "logprobs": 1, "n": 2}
    async with running_front(directory, says("abc")) as front, door(front) as http:
        alone = (await http.post("/v1/completions", json=asked)).json()["choices"]
        whole = (await http.post("/v1/completions", json={**asked, "echo": True})).json()["choices"]
        streamed = events((await http.post("/v1/completions", json={**asked, "echo": True, "stream": True})).text)
        ids = front.encode("hello w")
        for index in range(2):
            logprobs, answered = whole[index]["logprobs"], alone[index]["logprobs"]
            assert whole[index]["text"] == "hello w" + alone[index]["text"] and "prompt_logprobs" not in whole[index]
            assert logprobs["tokens"][: len(ids)] == ["hello", " w"]
            assert logprobs["tokens"][len(ids) :] == answered["tokens"]
            assert logprobs["text_offset"] == [
                0,
                5,
                *(7 + offset for offset in alone[index]["logprobs"]["text_offset"]),
            ]
            parts = of_choice(streamed, index)
            assert "".join(part["text"] for part in parts) == whole[index]["text"]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [each for part in parts for each in part["logprobs"][name]] == logprobs[name]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_tells_of_its_prompt_in_its_first_chunk(directory: Path, path: str) -> None:
    asked = {"max_tokens": 5, "prompt_logprobs": 1, "return_token_ids": True}
    asked |= {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    async with running_front(directory, says("abc")) as front, door(front) as http:
        whole = (await http.post(path, json=asked)).json()
        chunks = events((await http.post(path, json={**asked, "stream": True})).text)
        told, holders = (whole["choices"][0], [chunk["choices"][0] for chunk in chunks])
        if "chat" in path:
            told, holders = whole, chunks
        for name in ("prompt_logprobs", "prompt_token_ids"):
            assert told[name] and holders[0][name] == told[name]
            assert not any(name in holder for holder in holders[1:])


# ---- names that vLLM's clients send -------------------------------------------------------------------------------


async def test_what_vllm_calls_them_is_taken_and_means_the_same(directory: Path) -> None:
    extra = {
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": True,
        "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "detokenize": True, "add_special_tokens": True,
    }  # fmt: skip
    async with running_front(directory, says("one two<|im_end|> ")) as front, door(front) as http:
        asked = {"prompt": "x", "max_tokens": 60, "stop": "two", **extra}
        choice = (await http.post("/v1/completions", json=asked)).json()["choices"][0]
        assert choice["text"] == "one two" and choice["finish_reason"] == "stop"
        asked |= {"stop": None, "max_tokens": 8}
        assert "<|im_end|>" in (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]


def test_a_field_that_nobody_knows_is_logged_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(schema, "log", SimpleNamespace(debug=lambda event, **fields: logged.append(fields)))
    schema.CompletionBody.model_validate({"prompt": "x", "brand_new": 1, "seed": 7}).check_others()
    assert logged == [{"field": "brand_new"}]


@pytest.mark.parametrize(
    ("field", "value"), [("allowed_token_ids", [1]), ("logits_processors", ["x"]), ("truncate_prompt_tokens", 4)]
)
async def test_what_is_not_built_is_refused_by_name(directory: Path, field: str, value: Any) -> None:
    async with running_front(directory, says("abc")) as front, door(front) as http:
        answer: httpx.Response = await http.post("/v1/completions", json={"prompt": "x", field: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
