"""What a client asks for, checked once and turned into plain values: the one validator of the public API.

An absent field takes the model's default, never proto3's zero. Every number has a minimum and a maximum. A field
whose feature is not built is refused by name, never ignored. Knows the model's names and vocabulary; never
tokenizes, waits or talks to a worker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message as Protobuf

from engine.types import InvalidField, SamplingParams
from protos import generation_pb2 as gpb
from router.status import RequestError
from router.text.chat import Message, parse_messages, parse_template_arguments
from router.text.model import Prompt, TextModel, check_size
from wire.codec import params_fields

# Fields whose feature is not built. Whoever builds one deletes its row.
UNIMPLEMENTED_FIELDS: Mapping[str, str] = {
    "sampling.best_of": "choosing the best of several answers",
    "sampling.beam_width": "beam search",
    "sampling.length_penalty": "beam search",
    "stopping.bad_words": "banning words",
    "constraint.json_schema": "constrained output",
    "constraint.json_object": "constrained output",
    "constraint.regex": "constrained output",
    "constraint.grammar_ebnf": "constrained output",
    "constraint.choices": "constrained output",
    "constraint.structural_tag": "constrained output",
    "lora_adapter": "LoRA",
    "priority": "priorities",
    "chat.tools_json": "tool calling",
}

MAX_ID_LENGTH = 128
MAX_SALT_BYTES = 256
MAX_ARGUMENTS_BYTES = 2**16
MAX_PROMPT_TOKENS = 2**20
MAX_PROMPT_LOGPROBS = 200_000  # candidates of a whole prompt: they travel in one message
MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_DELAY_S = 60.0
DEFAULT_CHUNK_DELAY_S = 1.0  # where a client asks for larger chunks and names no limit


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Message]
    arguments: Mapping[str, Any]


PromptSource = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class OutputOptions:
    return_text: bool = True
    return_token_ids: bool = False
    keep_special_tokens: bool = False
    echo_prompt: bool = False
    prompt_only: bool = False  # an echo with max_tokens 0: the answer is the prompt


@dataclass(frozen=True, slots=True)
class Chunking:
    """A delta waits until it has `min_tokens`, but not longer than `max_delay` seconds. The first one never waits."""

    min_tokens: int = 1
    max_delay: float = DEFAULT_CHUNK_DELAY_S


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in plain values, as either door reads it from its own messages; nothing of it is checked yet.

    `params` are the fields of SamplingParams that the client set.
    """

    model: str
    source: PromptSource
    params: Mapping[str, Any]
    output: OutputOptions = OutputOptions()
    request_id: str = ""
    cache_salt: str = ""
    resume: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """`request_id` is the client's, for its own logs; it is empty if the client gave none and is never a key."""

    request_id: str
    source: PromptSource
    params: SamplingParams
    output: OutputOptions
    namespace: bytes
    resume: Sequence[int]


def check_generate(pb: gpb.GenerateRequest, model: TextModel) -> CheckedRequest:
    """Raises RequestError: NOT_FOUND, UNIMPLEMENTED or INVALID_ARGUMENT, with the field."""
    try:
        check_model(pb.model, model)  # first: what a model cannot do says nothing of another one
        check_implemented(pb)
        asked = Asked(
            model=pb.model,
            source=_prompt_source(pb),
            params=params_fields(pb.sampling, pb.stopping, pb.output),
            output=_output(pb.output),
            request_id=pb.request_id,
            cache_salt=pb.cache_salt,
            resume=pb.resume.ids,
        )
        return check_asked(asked, model)
    except InvalidField as error:
        raise invalid(error) from error


def check_asked(asked: Asked, model: TextModel) -> CheckedRequest:
    """Every rule of a request, for every door. Raises InvalidField, or RequestError for another model's name."""
    check_model(asked.model, model)
    asked = _prompt_alone(asked)
    checked = CheckedRequest(
        request_id=_check_length("request_id", asked.request_id, MAX_ID_LENGTH),
        source=_check_source(asked.source, model),
        params=_params(asked.params, model),
        output=asked.output,
        namespace=_namespace(asked.cache_salt),
        resume=check_token_ids("resume", asked.resume, model.vocab_size),
    )
    _check_resume(checked)
    return checked


def _prompt_alone(asked: Asked) -> Asked:
    """An echo may ask for 0 tokens. A worker computes a prompt for the token behind it: one is made, and not shown."""
    params = asked.params
    if not asked.output.echo_prompt or params.get("max_tokens") != 0 or params.get("min_tokens"):
        return asked
    return replace(asked, params={**params, "max_tokens": 1}, output=replace(asked.output, prompt_only=True))


def check_tokenize(pb: gpb.TokenizeRequest, model: TextModel) -> TextPrompt | ChatPrompt:
    """An empty text is fine here: it has no tokens, or the special ones alone."""
    try:
        check_model(pb.model, model)
        match pb.WhichOneof("prompt"):
            case "chat":
                check_implemented(pb)
                return _chat(pb.chat)
            case "text":
                return TextPrompt(pb.text)
        raise InvalidField("prompt", "the request has no prompt: set text or chat")
    except InvalidField as error:
        raise invalid(error) from error


def check_detokenize(pb: gpb.DetokenizeRequest, model: TextModel) -> Sequence[int]:
    try:
        check_model(pb.model, model)
        return check_token_ids("token_ids", pb.token_ids, model.vocab_size)
    except InvalidField as error:
        raise invalid(error) from error


def check_chunking(pb: gpb.GenerateStreamRequest) -> Chunking:
    delay = pb.max_chunk_delay.seconds + pb.max_chunk_delay.nanos * 1e-9
    try:
        _check_range("min_tokens_per_chunk", pb.min_tokens_per_chunk, 0, MAX_CHUNK_TOKENS)
        _check_range("max_chunk_delay", delay, 0, MAX_CHUNK_DELAY_S)
    except InvalidField as error:
        raise invalid(error) from error
    return Chunking(max(1, pb.min_tokens_per_chunk), delay if pb.HasField("max_chunk_delay") else DEFAULT_CHUNK_DELAY_S)


def check_prompt(prompt: Prompt, params: SamplingParams) -> None:
    """What can be said only once the prompt is tokens."""
    if not prompt.token_ids:
        raise RequestError("INVALID_ARGUMENT", "the prompt is empty: it has no tokens", field="prompt")
    if params.prompt_logprobs is not None:
        largest = MAX_PROMPT_LOGPROBS // (params.prompt_logprobs + 1)
        if len(prompt.token_ids) > largest:
            raise RequestError(
                "INVALID_ARGUMENT",
                f"the prompt has {len(prompt.token_ids)} tokens, and with prompt_logprobs of {params.prompt_logprobs} "
                f"at most {largest} fit into one answer",
                field="output.prompt_logprobs",
            )


def check_model(name: str, model: TextModel) -> None:
    """An empty name means the served model."""
    if name and name not in model.names:
        raise RequestError(
            "NOT_FOUND",
            f"the model {name[:MAX_ID_LENGTH]!r} is not served here; this router serves {', '.join(model.names)}",
            field="model",
            facts={"served": ", ".join(model.names)},
        )


def check_implemented(pb: Protobuf) -> None:
    for path, feature in UNIMPLEMENTED_FIELDS.items():
        if is_set(pb, path):
            raise RequestError("UNIMPLEMENTED", f"{path} is set, but {feature} is not built yet", field=path)


def is_set(pb: Protobuf, path: str) -> bool:
    """Whether the client set the field at this dotted path. A path that the message does not have is unset."""
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in pb.DESCRIPTOR.fields_by_name or not pb.HasField(name):
            return False
        pb = getattr(pb, name)
    field = pb.DESCRIPTOR.fields_by_name.get(leaf)
    if field is None:
        return False
    return pb.HasField(leaf) if field.has_presence else bool(getattr(pb, leaf))


def invalid(error: InvalidField) -> RequestError:
    """The error of a parameter, under the name that its field has in the request."""
    return RequestError("INVALID_ARGUMENT", str(error), field=_PATHS.get(error.field, error.field))


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`. Choice 0 keeps the request's own, so that n = 1 with a seed gives choice 0."""
    if index == 0:
        return seed
    digest = hashlib.sha256(b"choice" + seed.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")


# ---- the parts of a request -------------------------------------------------------------------------------------

# SamplingParams names its fields as vLLM does; in the request they lie in these three messages.
_PATHS = {
    field.name: f"{part}.{field.name}"
    for part, kind in (
        ("sampling", gpb.SamplingParams),
        ("stopping", gpb.StoppingParams),
        ("output", gpb.OutputOptions),
    )
    for field in kind.DESCRIPTOR.fields
}


def _prompt_source(pb: gpb.GenerateRequest) -> PromptSource:
    match pb.WhichOneof("prompt"):
        case "text":
            return TextPrompt(pb.text)
        case "token_ids":
            return TokenPrompt(pb.token_ids.ids)
        case "chat":
            return _chat(pb.chat)
    raise InvalidField("prompt", "the request has no prompt: set text, token_ids or chat")


def _check_source(source: PromptSource, model: TextModel) -> PromptSource:
    match source:
        case TextPrompt() if not source.text:
            raise InvalidField("text", "the prompt is empty: text must have at least one character")
        case TokenPrompt() if not source.token_ids:
            raise InvalidField("token_ids", "the prompt is empty: token_ids must have at least one id")
        case TokenPrompt():
            return TokenPrompt(check_token_ids("token_ids", source.token_ids, model.vocab_size))
    return source


def _chat(pb: gpb.ChatPrompt) -> ChatPrompt:
    check_size("chat.messages_json", pb.messages_json)
    _check_length("chat.template_kwargs_json", pb.template_kwargs_json, MAX_ARGUMENTS_BYTES)
    return ChatPrompt(parse_messages(pb.messages_json), parse_template_arguments(pb.template_kwargs_json))


def _params(asked: Mapping[str, Any], model: TextModel) -> SamplingParams:
    fields: dict[str, Any] = {**model.defaults, **asked}
    if "max_tokens" not in asked and asked.get("min_tokens", 0) > fields.get("max_tokens", math.inf):
        del fields["max_tokens"]  # the model's default gives way to what the client asks for
    params = SamplingParams(**fields)
    check_token_ids("stop_token_ids", params.stop_token_ids, model.vocab_size)
    check_token_ids("logit_bias", tuple(params.logit_bias), model.vocab_size)
    return params


def _output(pb: gpb.OutputOptions) -> OutputOptions:
    return OutputOptions(
        return_text=pb.return_text or not pb.return_token_ids,
        return_token_ids=pb.return_token_ids,
        keep_special_tokens=pb.keep_special_tokens,
        echo_prompt=pb.echo_prompt,
    )


def _check_resume(request: CheckedRequest) -> None:
    if not request.resume:
        return
    params = request.params
    if params.n != 1:
        raise InvalidField("resume", f"resume continues one answer, so n must be 1, got {params.n}")
    if params.seed is None and not params.greedy:
        raise InvalidField("seed", "resume needs the seed that the first answer started with, or temperature 0")


def _namespace(salt: str) -> bytes:
    """Requests share cached prefixes only within one namespace; no salt is the shared one."""
    _check_length("cache_salt", salt, MAX_SALT_BYTES)
    return hashlib.sha256(b"pagewire cache salt" + salt.encode()).digest() if salt else b""


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> Sequence[int]:
    if len(ids) > MAX_PROMPT_TOKENS:
        raise InvalidField(field, f"{field} must have at most {MAX_PROMPT_TOKENS} token ids, got {len(ids)}")
    wrong = [each for each in (min(ids), max(ids)) if not 0 <= each < vocab_size] if ids else []
    if wrong:
        raise InvalidField(field, f"{field} has the token id {wrong[0]}; the model's ids are 0 to {vocab_size - 1}")
    return tuple(ids)


def _check_length(field: str, text: str, most: int) -> str:
    if (size := len(text.encode())) > most:
        raise InvalidField(field, f"{field} must have at most {most} bytes, got {size}")
    return text


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidField(field, f"{field} must be in [{low:g}, {high:g}], got {value:g}")
