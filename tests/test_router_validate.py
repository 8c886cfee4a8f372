"""Every field of a request has a meaning, a range, or a refusal that names it."""

from __future__ import annotations

from typing import Any

import pytest
from router_front import make_model_dir

from engine.types import SamplingParams
from protos import generation_pb2 as gpb
from router.config import parse
from router.status import RequestError
from router.text.model import TextModel
from router.validate import (
    UNIMPLEMENTED_FIELDS,
    TextPrompt,
    check_chunking,
    check_detokenize,
    check_generate,
    check_tokenize,
    choice_seed,
    is_set,
)
from router.workers import Role
from wire.flags import BadOption


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "max_new_tokens": 20, "do_sample": True}
    return TextModel(("tiny",), make_model_dir(tmp_path_factory.mktemp("model"), generation_config=defaults))


def request(**parts: Any) -> gpb.GenerateRequest:
    return gpb.GenerateRequest(**{"text": "hello", **parts})


def refused(asked: gpb.GenerateRequest, model: TextModel) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_generate(asked, model)
    return caught.value


def set_field(pb: Any, path: str) -> None:
    """Gives the field at this path a value that is not its default."""
    *parents, leaf = path.split(".")
    for name in parents:
        pb = getattr(pb, name)
    kind = pb.DESCRIPTOR.fields_by_name[leaf]
    if kind.type == kind.TYPE_MESSAGE:
        getattr(pb, leaf).SetInParent()
    elif kind.is_repeated:
        getattr(pb, leaf).append("x")
    else:
        setattr(pb, leaf, {kind.TYPE_STRING: "x", kind.TYPE_BOOL: True}.get(kind.type, 1))


# ---- presence -----------------------------------------------------------------------------------------------------


def test_absent_fields_take_the_models_defaults_and_then_our_own(model: TextModel) -> None:
    params = check_generate(request(), model).params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 20)
    assert (params.top_k, params.min_p, params.seed) == (0, 0.0, None)  # its top_k of -1 is no value of ours


def test_a_field_that_is_set_counts_even_at_zero(model: TextModel) -> None:
    params = check_generate(request(sampling=gpb.SamplingParams(temperature=0, top_k=0, seed=0)), model).params
    assert (params.temperature, params.top_k, params.seed) == (0, 0, 0)
    error = refused(request(stopping=gpb.StoppingParams(max_tokens=0)), model)
    assert error.field == "stopping.max_tokens"


def test_the_models_length_default_gives_way_to_a_longer_minimum(model: TextModel) -> None:
    params = check_generate(request(stopping=gpb.StoppingParams(min_tokens=50)), model).params
    assert params.min_tokens == 50 and params.max_tokens is None


def test_text_is_returned_unless_only_ids_are_asked_for(model: TextModel) -> None:
    assert check_generate(request(), model).output.return_text
    only_ids = gpb.OutputOptions(return_token_ids=True)
    assert not check_generate(request(output=only_ids), model).output.return_text


def test_every_parameter_reaches_the_workers(model: TextModel) -> None:
    sampling = gpb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=2, frequency_penalty=-1,
        presence_penalty=1, seed=2**64 - 1, n=2, logit_bias={5: -100},
    )  # fmt: skip
    stopping = gpb.StoppingParams(max_tokens=9, min_tokens=2, stop=["a"], stop_token_ids=[7], ignore_eos=True)
    output = gpb.OutputOptions(logprobs=4, prompt_logprobs=0)
    assert check_generate(request(sampling=sampling, stopping=stopping, output=output), model).params == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=2, frequency_penalty=-1,
        presence_penalty=1, seed=2**64 - 1, n=2, logit_bias={5: -100}, max_tokens=9, min_tokens=2, stop=("a",),
        stop_token_ids=(7,), ignore_eos=True, logprobs=4, prompt_logprobs=0,
    )  # fmt: skip


# ---- ranges -------------------------------------------------------------------------------------------------------

VOCABULARY = 265
OUT_OF_RANGE = [
    ("sampling.temperature", gpb.SamplingParams(temperature=-0.5)),
    ("sampling.temperature", gpb.SamplingParams(temperature=float("nan"))),
    ("sampling.top_p", gpb.SamplingParams(top_p=0)),
    ("sampling.top_p", gpb.SamplingParams(top_p=1.5)),
    ("sampling.top_k", gpb.SamplingParams(top_k=2**32 - 1)),
    ("sampling.min_p", gpb.SamplingParams(min_p=2)),
    ("sampling.repetition_penalty", gpb.SamplingParams(repetition_penalty=0)),
    ("sampling.frequency_penalty", gpb.SamplingParams(frequency_penalty=3)),
    ("sampling.presence_penalty", gpb.SamplingParams(presence_penalty=-3)),
    ("sampling.n", gpb.SamplingParams(n=0)),
    ("sampling.n", gpb.SamplingParams(n=17)),
    ("sampling.logit_bias", gpb.SamplingParams(logit_bias={1: 101})),
    ("sampling.logit_bias", gpb.SamplingParams(logit_bias={VOCABULARY: 1})),
    ("stopping.max_tokens", gpb.StoppingParams(max_tokens=2**32 - 1)),
    ("stopping.min_tokens", gpb.StoppingParams(min_tokens=5, max_tokens=4)),
    ("stopping.stop", gpb.StoppingParams(stop=[""])),
    ("stopping.stop", gpb.StoppingParams(stop=["x" * 257])),
    ("stopping.stop", gpb.StoppingParams(stop=["x"] * 17)),
    ("stopping.stop_token_ids", gpb.StoppingParams(stop_token_ids=[VOCABULARY])),
    ("stopping.stop_token_ids", gpb.StoppingParams(stop_token_ids=[1] * 129)),
    ("output.logprobs", gpb.OutputOptions(logprobs=21)),
    ("output.prompt_logprobs", gpb.OutputOptions(prompt_logprobs=2**31)),
    ("request_id", "x" * 129),
    ("cache_salt", "é" * 129),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_its_path(model: TextModel, field: str, value: Any) -> None:
    error = refused(request(**{field.split(".")[0]: value}), model)
    assert error.code == "INVALID_ARGUMENT" and error.field == field
    assert field.split(".")[-1] in str(error) or "stop string" in str(error)


def test_token_ids_have_to_be_the_models(model: TextModel) -> None:
    for path, asked in (
        ("token_ids", gpb.GenerateRequest(token_ids=gpb.TokenIds(ids=[1, VOCABULARY]))),
        ("resume", request(resume=gpb.TokenIds(ids=[VOCABULARY]))),
    ):
        error = refused(asked, model)
        assert error.field == path and f"the model's ids are 0 to {VOCABULARY - 1}" in str(error)
    with pytest.raises(RequestError, match="token id 999"):
        check_detokenize(gpb.DetokenizeRequest(token_ids=[999]), model)


def test_resuming_needs_one_answer_and_its_seed(model: TextModel) -> None:
    held = gpb.TokenIds(ids=[1, 2])
    assert refused(request(resume=held), model).field == "sampling.seed"
    assert refused(request(resume=held, sampling=gpb.SamplingParams(n=2, seed=1)), model).field == "resume"
    assert check_generate(request(resume=held, sampling=gpb.SamplingParams(temperature=0)), model).resume == (1, 2)
    assert check_generate(request(resume=held, sampling=gpb.SamplingParams(seed=9)), model).resume == (1, 2)


def test_chunks_have_limits_of_their_own() -> None:
    assert check_chunking(gpb.GenerateStreamRequest()).min_tokens == 1
    with pytest.raises(RequestError, match="min_tokens_per_chunk"):
        check_chunking(gpb.GenerateStreamRequest(min_tokens_per_chunk=2000))
    for seconds in (-1, 61):
        late = gpb.GenerateStreamRequest()
        late.max_chunk_delay.seconds = seconds
        with pytest.raises(RequestError, match="max_chunk_delay"):
            check_chunking(late)


# ---- what is not built --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNIMPLEMENTED_FIELDS)
def test_a_field_whose_feature_is_not_built_is_refused_by_name(model: TextModel, path: str) -> None:
    asked = gpb.GenerateRequest(chat=gpb.ChatPrompt(messages_json="[]")) if path.startswith("chat.") else request()
    assert not is_set(asked, path)
    set_field(asked, path)
    error = refused(asked, model)
    assert error.code == "UNIMPLEMENTED" and error.field == path and path in str(error)


def test_tools_are_refused_where_text_is_only_counted(model: TextModel) -> None:
    chat = gpb.ChatPrompt(messages_json='[{"role": "user", "content": "a"}]', tools_json="[]")
    with pytest.raises(RequestError, match=r"chat\.tools_json"):
        check_tokenize(gpb.TokenizeRequest(chat=chat), model)
    assert check_tokenize(gpb.TokenizeRequest(text=""), model) == TextPrompt("")


# ---- the rest -----------------------------------------------------------------------------------------------------


def test_salts_separate_caches_and_no_salt_is_shared(model: TextModel) -> None:
    spaces = [check_generate(request(cache_salt=salt), model).namespace for salt in ("", "a", "b", "a")]
    assert spaces[0] == b"" and spaces[1] == spaces[3] != spaces[2] and len(spaces[1]) == 32


def test_choices_have_different_seeds_that_depend_on_the_first_alone() -> None:
    seeds = [choice_seed(5, index) for index in range(16)]
    assert seeds[0] == 5 and len(set(seeds)) == 16 and all(0 <= seed < 2**64 for seed in seeds)
    assert seeds == [choice_seed(5, index) for index in range(16)]


def test_settings_come_from_flags_and_variables_and_a_flag_wins() -> None:
    environ = {"PAGEWIRE_MODEL": "smollm2", "PAGEWIRE_PORT": "1234", "PAGEWIRE_PREFILL": "a:1,b:2"}
    settings = parse(["--port", "99", "--decode", "c:3", "--decode", "d:4,c:3", "--queue", "7"], environ)
    assert (settings.model, settings.port, settings.core.max_queued_requests) == ("smollm2", 99, 7)
    assert settings.targets == (
        (Role.PREFILL, "a:1"),
        (Role.PREFILL, "b:2"),
        (Role.DECODE, "c:3"),
        (Role.DECODE, "d:4"),
    )
    assert parse(["--model", "m", "--prefill", "x:1"], environ).targets[0] == (Role.PREFILL, "x:1")
    assert parse(["--model", "m"], {}).targets == ((Role.PREFILL, "127.0.0.1:50061"), (Role.DECODE, "127.0.0.1:50071"))


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "--model is missing"),
        (["--model", "m", "--port", "70000"], r"--port: must be a whole number in \[0, 65535\], got '70000'"),
        (["--model", "m", "--prefill", "host"], "--prefill: a worker is named host:port, got 'host'"),
        (["--model", "m", "--grace", "x"], "--grace: must be seconds"),
        (["--model", "m", "--token-file", "/nowhere"], "--token-file /nowhere cannot be read"),
        (["--model", "m", "--nonsense"], "--nonsense"),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], word: str) -> None:
    with pytest.raises(BadOption, match=word):
        parse(argv, {})
