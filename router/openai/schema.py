"""The bodies that clients send: fields and types. Ranges are not here; engine.types and validate.py have them.

A field that nobody knows is accepted and logged at debug, since clients' libraries add new ones. A field that is
known and whose feature is not built is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from engine.types import InvalidField
from router.text.chat import ROLES
from router.validate import UNIMPLEMENTED_FIELDS
from wire.logs import get_logger

log = get_logger("openai")

_CONSTRAINED = UNIMPLEMENTED_FIELDS["constraint.json_schema"]
_BEAMS = UNIMPLEMENTED_FIELDS["sampling.beam_width"]
_TOOLS = UNIMPLEMENTED_FIELDS["chat.tools_json"]

# Known fields whose feature is not built. Whoever builds one deletes its row and declares the field.
UNBUILT: Mapping[str, str] = {
    "response_format": _CONSTRAINED,
    "structured_outputs": _CONSTRAINED,
    "guided_json": _CONSTRAINED,
    "guided_regex": _CONSTRAINED,
    "guided_choice": _CONSTRAINED,
    "guided_grammar": _CONSTRAINED,
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "best_of": UNIMPLEMENTED_FIELDS["sampling.best_of"],
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "bad_words": UNIMPLEMENTED_FIELDS["stopping.bad_words"],
    "allowed_token_ids": "choosing among some tokens alone",
    "logits_processors": "logits processors",
    "truncate_prompt_tokens": "truncating a prompt",
    "prompt_embeds": "embeddings in place of a prompt",
    "return_tokens_as_token_ids": "token ids in place of texts",
    "priority": UNIMPLEMENTED_FIELDS["priority"],
    "suffix": "filling in the middle",
    "reasoning_effort": "reasoning effort",
    "continue_final_message": "continuing the last message",
    "chat_template": "a template from a client",
    "documents": "documents for the template",
    "modalities": "anything but text",
    "audio": "audio",
    "prediction": "predicted output",
    "web_search_options": "web search",
}
# Values that ask for nothing, beside null, false and what is empty.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "priority": (0,),
    "modalities": (["text"],),
}


class _Body(BaseModel):
    """`model` may be left out: it is the served one then."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None

    def check_others(self) -> None:
        """The fields that are not declared. Raises InvalidField for one whose feature is not built."""
        others = self.model_extra or {}
        for name, value in others.items():
            if name not in UNBUILT:
                log.debug("unknown_field", field=name[:64])
            elif value not in (None, False, [], {}, "") and value not in _HARMLESS.get(name, ()):
                raise InvalidField(name, f"{name} is set, but {UNBUILT[name]} is not built yet")


class Fault(BaseModel):
    """What is wrong, in one sentence; `param` is the field at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of every answer that is none."""

    error: Fault


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(_Body):
    """What both kinds of completion have; the names are OpenAI's and vLLM's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # taken for its senders' sake: tokenizers here add none
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


# What router.text.chat takes, for whoever reads /openapi.json; that is where messages are checked.
_MESSAGE: JsonDict = {
    "type": "object",
    "properties": {"role": {"enum": list(ROLES)}, "content": {"type": "string"}},
    "required": ["role", "content"],
}


class ChatBody(Sampled):
    messages: list[Any] = Field(json_schema_extra={"items": _MESSAGE, "minItems": 1})
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(Sampled):
    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeBody(_Body):
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
    tokens: list[int]
