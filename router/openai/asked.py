"""A body as the plain request that every door makes (validate.Asked), and a refusal back in the body's own names.

Only what OpenAI's and vLLM's API says about itself is checked here: which fields go together. Everything else is
checked by validate.py, once for all doors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.types import InvalidField
from router.openai.schema import ChatBody, CompletionBody, Sampled, TokenizeBody
from router.status import RequestError
from router.text.chat import check_messages, check_template_arguments
from router.text.model import TextModel
from router.validate import (
    Asked,
    ChatPrompt,
    CheckedRequest,
    OutputOptions,
    PromptSource,
    TextPrompt,
    TokenPrompt,
    check_asked,
    check_model,
    check_token_ids,
)

MAX_PROMPTS = 128  # of one call
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's; an answer in a chat may be as long as fits

# Fields of SamplingParams that have the same name here.
_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "n", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
# What validate.py calls a field, and what it is called here.
_NAMES = {
    "chat.messages_json": "messages",
    "chat.template_kwargs_json": "chat_template_kwargs",
    "chat": "messages",
    "text": "prompt",
    "token_ids": "prompt",
    "request_id": "X-Request-Id",
}


def chat_asked(body: ChatBody, request_id: str, model: TextModel) -> CheckedRequest:
    """Raises InvalidField or RequestError."""
    body.check_others()
    _check_stream(body)
    params = _params(body)
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs", "top_logprobs needs logprobs to be true")
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    source = _chat(body.messages, body.chat_template_kwargs, body.add_generation_prompt)
    try:
        return check_asked(_asked(body, source, params, request_id), model)
    except InvalidField as error:
        renamed = {"logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        if (name := renamed.get(error.field)) is None:
            raise
        raise InvalidField(name, str(error).replace(error.field, name)) from error


def completion_asked(body: CompletionBody, request_id: str, model: TextModel) -> Sequence[CheckedRequest]:
    """One request for every prompt. Raises InvalidField or RequestError."""
    body.check_others()
    _check_stream(body)
    params = _params(body)
    if body.max_tokens is None:
        params["max_tokens"] = max(DEFAULT_MAX_TOKENS, body.min_tokens or 0)
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:  # the prompt is part of the answer, and its tokens have logprobs like the others
            params.setdefault("prompt_logprobs", body.logprobs)
    return [
        check_asked(_asked(body, source, params, request_id, echo=bool(body.echo)), model)
        for source in _prompts(body.prompt)
    ]


def tokenize_asked(body: TokenizeBody, model: TextModel) -> PromptSource:
    body.check_others()
    check_model(body.model or "", model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt", "set either prompt or messages")
    if body.prompt is not None:
        return TextPrompt(body.prompt)
    return _chat(body.messages, body.chat_template_kwargs, body.add_generation_prompt)


def tokens_asked(model_name: str | None, tokens: Sequence[int], model: TextModel) -> Sequence[int]:
    check_model(model_name or "", model)
    return check_token_ids("tokens", tokens, model.vocab_size)


def in_our_names(error: RequestError) -> RequestError:
    """The same refusal, where the gRPC API and this one differ in a field's name."""
    field = error.field.removeprefix("sampling.").removeprefix("stopping.").removeprefix("output.")
    name = _NAMES.get(field, field)
    sentence = str(error)
    if name != field:
        sentence = re.sub(rf"(?<![\w.]){re.escape(field)}(?![\w.])", name, sentence)
    return RequestError(
        error.code, sentence, field=name, reason=error.reason, facts=error.facts, retry_after=error.retry_after
    )


def _params(body: Sampled) -> dict[str, Any]:
    params = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        params["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    params["include_stop_in_output"] = bool(body.include_stop_str_in_output)
    params["logit_bias"] = _bias(body.logit_bias or {})
    return params


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """A JSON object's names are strings, so token ids are too."""
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 11):
            raise InvalidField("logit_bias", f"logit_bias maps token ids to numbers, and {name[:32]!r} is no token id")
    return {int(name): bias for name, bias in given.items()}


def _asked(
    body: Sampled, source: PromptSource, params: Mapping[str, Any], request_id: str, echo: bool = False
) -> Asked:
    return Asked(
        model=body.model or "",
        source=source,
        params=params,
        output=OutputOptions(
            return_text=True,
            return_token_ids=bool(body.return_token_ids),
            keep_special_tokens=body.skip_special_tokens is False,
            echo_prompt=echo,
        ),
        request_id=request_id,
        cache_salt=body.cache_salt or "",
    )


def _chat(messages: object, arguments: Mapping[str, Any] | None, add_generation_prompt: bool | None) -> ChatPrompt:
    given = dict(arguments or {})
    if add_generation_prompt is not None:
        given["add_generation_prompt"] = add_generation_prompt
    return ChatPrompt(check_messages(messages), check_template_arguments(given))


def _prompts(prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> Sequence[PromptSource]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt or isinstance(prompt[0], int):
        return [TokenPrompt(prompt)]  # type: ignore[arg-type]  # all of one kind, as its type says
    if len(prompt) > MAX_PROMPTS:
        raise InvalidField("prompt", f"prompt must have 1 to {MAX_PROMPTS} prompts, got {len(prompt)}")
    return [TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in prompt]  # type: ignore[arg-type]


def _check_stream(body: Sampled) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidField("stream_options", "stream_options needs stream to be true")
