"""What the clients send and get: messages of generation.proto on one side, plain values of answers.py on the other.

Pure. What a user gives that is no request is a PagewireError in one sentence; ranges are the router's to check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, SupportsIndex

from engine.types import FinishReason, SamplingParams
from pagewire.answers import Delta, Model, PagewireError, Result, ServerInfo, Started, Timing, Usage, WorkerStatus
from protos import generation_pb2 as gpb
from wire.codec import from_duration, logprob_from_pb
from wire.pairing import paths_from_pb

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages  # text, token ids, or a chat

# ---- requests ---------------------------------------------------------------------------------------------------
_SAMPLING = tuple(
    field.name for field in fields(SamplingParams) if field.name in gpb.SamplingParams.DESCRIPTOR.fields_by_name
)


@contextmanager
def _building() -> Iterator[None]:
    """What neither protobuf nor JSON takes is no request."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise PagewireError("INVALID_ARGUMENT", f"the request cannot be built: {error}") from error


@_building()
def build_request(
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    model: str = "",
    request_id: str = "",
    return_text: bool = True,
    return_token_ids: bool = True,
    keep_special_tokens: bool = False,
    echo_prompt: bool = False,
    cache_salt: str = "",
    resume: Sequence[int] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> gpb.GenerateRequest:
    """`resume` are the tokens of an interrupted answer, which goes on after them."""
    if not isinstance(params, SamplingParams | None):
        raise _no_request("params must be SamplingParams", params)
    request = gpb.GenerateRequest(
        request_id=request_id,
        model=model,
        output=gpb.OutputOptions(
            return_text=return_text,
            return_token_ids=return_token_ids,
            keep_special_tokens=keep_special_tokens,
            echo_prompt=echo_prompt,
        ),
        cache_salt=cache_salt,
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(_chat(prompt, template_kwargs))
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids(prompt))
    if resume:
        request.resume.ids.extend(resume)
    if params is not None:
        _set_params(request, params)
    return request


def _set_params(request: gpb.GenerateRequest, params: SamplingParams) -> None:
    for name in _SAMPLING:
        if name != "logit_bias" and (value := getattr(params, name)) is not None:
            setattr(request.sampling, name, value)
    request.sampling.logit_bias.update(params.logit_bias)
    stopping = request.stopping
    if params.max_tokens is not None:
        stopping.max_tokens = params.max_tokens
    stopping.min_tokens = params.min_tokens
    stopping.stop.extend(params.stop)
    stopping.stop_token_ids.extend(params.stop_token_ids)
    stopping.ignore_eos = params.ignore_eos
    stopping.include_stop_in_output = params.include_stop_in_output
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name)) is not None:
            setattr(request.output, name, value)
    if not params.skip_special_tokens:
        request.output.keep_special_tokens = True


def _chat(messages: Any, template_kwargs: Mapping[str, Any] | None) -> gpb.ChatPrompt:
    arguments = json.dumps(template_kwargs) if template_kwargs else ""
    return gpb.ChatPrompt(messages_json=json.dumps(list(messages)), template_kwargs_json=arguments)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _token_ids(ids: Any) -> Sequence[int]:
    if (
        isinstance(ids, str)
        or not isinstance(ids, Sequence)
        or not all(isinstance(each, SupportsIndex) for each in ids)
    ):
        raise _no_request("a prompt must be one text, token ids or chat messages", ids)
    return ids


def _no_request(rule: str, given: object) -> PagewireError:
    kind = type(given).__name__
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        kind += f" of {type(given[0]).__name__}"
    return PagewireError("INVALID_ARGUMENT", f"the request cannot be built: {rule}, got {kind}")


@_building()
def tokenize_request(prompt: str | Messages, add_special_tokens: bool) -> gpb.TokenizeRequest:
    if isinstance(prompt, str):
        return gpb.TokenizeRequest(text=prompt, add_special_tokens=add_special_tokens)
    if not _is_chat(prompt):
        raise _no_request("a text or chat messages become tokens", prompt)
    return gpb.TokenizeRequest(chat=_chat(prompt, None), add_special_tokens=add_special_tokens)


@_building()
def detokenize_request(token_ids: Sequence[int]) -> gpb.DetokenizeRequest:
    return gpb.DetokenizeRequest(token_ids=_token_ids(token_ids))


# ---- answers ----------------------------------------------------------------------------------------------------


def take(stream: Any, response: gpb.GenerateStreamResponse) -> Delta | None:
    """What the response says of the stream becomes its `started`, `usage` and `timing`; a delta is given back."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            stream.started = Started(
                response.request_id,
                started.prompt_tokens,
                started.cached_prompt_tokens,
                started.seed,
                tuple(map(logprob_from_pb, started.prompt_logprobs)),
            )
        case "delta":
            return _delta(response.delta)
        case "finished":
            stream.usage, stream.timing = _usage(response.finished.usage), _timing(response.finished.timing)
    return None


def _delta(choice: gpb.Choice) -> Delta:
    matched = choice.stop_match.WhichOneof("matched")
    return Delta(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(map(logprob_from_pb, choice.logprobs)),
        finish_reason=FinishReason(choice.finish_reason) if choice.finish_reason else None,
        stop=getattr(choice.stop_match, matched) if matched else None,
    )


def result(response: gpb.GenerateResponse) -> Result:
    return Result(
        response.request_id,
        response.model,
        tuple(map(_delta, response.choices)),
        _usage(response.usage),
        _timing(response.timing),
        tuple(map(logprob_from_pb, response.prompt_logprobs)),
    )


def _usage(usage: gpb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)


def _timing(timing: gpb.Timing) -> Timing:
    return Timing(**{field.name: from_duration(getattr(timing, field.name)) for field in fields(Timing)})


def models(response: gpb.ListModelsResponse) -> list[Model]:
    return [Model(each.id, each.root, each.max_model_len) for each in response.models]


def server_info(response: gpb.GetServerInfoResponse) -> ServerInfo:
    workers = [
        replace(
            WorkerStatus(**{field.name: getattr(each, field.name) for field in fields(WorkerStatus)}),
            kv_paths=paths_from_pb(each.kv_paths),
            transports=tuple(each.transports),
        )
        for each in response.workers
    ]
    return ServerInfo(
        response.version,
        from_duration(response.uptime),
        response.prefill_workers,
        response.decode_workers,
        tuple(workers),
    )
