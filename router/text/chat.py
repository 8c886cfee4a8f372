"""A model's chat template: messages into the text that the model was trained on.

The template belongs to the model directory and runs in Jinja's immutable sandbox, with the names and filters that
transformers gives it. Messages and template arguments come from clients and are checked here. No template ever
comes from a client. Blocking: `router.text.model` keeps it off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.types import InvalidField

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_TEMPLATE_ARGUMENTS = 32
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "documents", "raise_exception", "strftime_now", *SPECIAL_TOKENS})

# What a template raises for messages that it did not foresee. The text of such an error is Python's, never shown.
_UNRENDERABLE = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip

Message = dict[str, Any]


class BadTemplate(Exception):
    """The directory's chat template cannot be read; str() is one sentence."""


class _TemplateError(jinja2.TemplateError):
    """The template itself refused the messages (raise_exception)."""


class _Generation(Extension):
    """{% generation %} marks what the model says; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


class ChatTemplate:
    """`special_tokens` are the names that templates use for them (bos_token, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """None if the model has no chat template. Raises BadTemplate."""
        config_path = directory / "tokenizer_config.json"
        try:
            config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
            source = _source(directory, config)
            return None if source is None else cls(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise BadTemplate(
                f"the chat template of {directory} has an error in line {error.lineno}: {error}"
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadTemplate(f"{config_path} or the chat template beside it cannot be read: {error}") from error

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        variables = {"add_generation_prompt": True, **self._special_tokens, **arguments}
        try:
            return self._template.render(messages=messages, tools=None, documents=None, **variables)
        except _TemplateError as error:
            raise InvalidField("chat", f"the model's chat template refuses these messages: {error}") from error
        except _UNRENDERABLE as error:
            raise InvalidField(
                "chat", f"the model's chat template cannot render these messages ({type(error).__name__})"
            ) from error


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A token is written as a string or as an object with its content."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


# ---- what clients send ------------------------------------------------------------------------------------------


_MESSAGES = "chat.messages_json"
_ARGUMENTS = "chat.template_kwargs_json"


def parse_messages(text: str) -> list[Message]:
    """The messages of a chat, or InvalidField saying which one is wrong."""
    return check_messages(_parse_json(_MESSAGES, text))


def check_messages(messages: object) -> list[Message]:
    field = _MESSAGES
    if not isinstance(messages, list) or not messages:
        raise InvalidField(field, f"{field} must be a JSON array with at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidField(field, f"{field} must have 1 to {MAX_MESSAGES} messages, got {len(messages)}")
    return [_check_message(f"message {number}", message) for number, message in enumerate(messages)]


def parse_template_arguments(text: str) -> dict[str, Any]:
    """Named scalars for the template; none may replace what the router itself passes."""
    return check_template_arguments(_parse_json(_ARGUMENTS, text)) if text else {}


def check_template_arguments(arguments: object) -> dict[str, Any]:
    field = _ARGUMENTS
    if not isinstance(arguments, dict) or len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise InvalidField(field, f"{field} must be a JSON object with at most {MAX_TEMPLATE_ARGUMENTS} names")
    for name, value in arguments.items():
        if not name.isidentifier() or name in RESERVED:
            raise InvalidField(field, f"{field} may not set {name[:64]!r}")
        if isinstance(value, dict | list):
            raise InvalidField(field, f"{field} must map {name!r} to a string, a number, a boolean or null")
    return arguments


def _parse_json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidField(field, f"{field} is not valid JSON{where}") from error


def _check_message(where: str, message: object) -> Message:
    field = _MESSAGES
    if not isinstance(message, dict):
        raise InvalidField(field, f"{where} must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidField(field, f"{where} has the role {str(role)[:64]!r}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(where, part) for part in content)
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InvalidField(field, f"the content of {where} must be a string or a list of text parts")
    return {**message, "content": content}


def _text_part(where: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    raise InvalidField(_MESSAGES, f"{where} has a content part that is not text")
