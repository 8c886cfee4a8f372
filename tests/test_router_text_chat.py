"""Chats are rendered by the model's own template, in a sandbox, and a malformed chat is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from router_front import make_model_dir

from engine.types import InvalidField
from router.text.chat import BadTemplate, ChatTemplate, parse_messages, parse_template_arguments

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **arguments: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or USER, arguments)


def test_a_template_is_rendered_as_transformers_renders_it() -> None:
    source = (
        "{{ bos_token }}\n"
        "    {%- for message in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "[{{ message.role }}] {{ message.content | trim }}\n"
        "{% generation %}body{% endgeneration %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}> {% endif %}"
    )
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}]
    expected, _ = transformers.render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(source, messages) == expected[0]  # type: ignore[arg-type]


def test_json_in_templates_keeps_characters_and_is_not_escaped_for_html() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )


def test_template_arguments_reach_the_template_and_may_turn_off_the_generation_prompt() -> None:
    source = "{{ thinking }}{% if add_generation_prompt %}>{% endif %}"
    arguments = parse_template_arguments('{"thinking": true, "add_generation_prompt": false}')
    assert ChatTemplate(source, {}).render(USER, arguments) == "True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.at.all }}",
        "{{ undefined_name() }}",
    ],
)
def test_a_template_that_reaches_out_or_breaks_is_the_requests_error_without_pythons_words(source: str) -> None:
    with pytest.raises(InvalidField, match="cannot render these messages") as caught:
        render(source)
    assert caught.value.field == "chat" and "__" not in str(caught.value)


def test_what_the_template_says_against_the_messages_is_passed_on() -> None:
    with pytest.raises(InvalidField, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_templates_and_special_tokens_come_from_the_files_that_models_have(tmp_path: Path) -> None:
    directory = make_model_dir(tmp_path)
    template = ChatTemplate.load(directory)
    assert template is not None and template.render(USER, {}).startswith("<|im_start|>user\nhi<|im_end|>")
    (directory / "chat_template.jinja").unlink()
    assert ChatTemplate.load(directory) is None
    for source in ("{{ eos_token }}", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]):
        config = {"eos_token": {"content": "</s>"}, "chat_template": source}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        template = ChatTemplate.load(directory)
        assert template is not None and template.render(USER, {}) == ("</s>" if isinstance(source, str) else "y")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not valid JSON"),
        ('[{"role": "user",}]', r"is not valid JSON \(line 1, column 18\)"),
        ("{}", "must be a JSON array"),
        ("[]", "at least one message"),
        ("[1]", "message 0 must be an object"),
        ('[{"role": "wizard", "content": ""}]', "message 0 has the role 'wizard'; roles are system"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', "the content of message 1 must be a string"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "message 0 has a content part that is not text"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_malformed_chat_is_refused_with_the_place(text: str, sentence: str) -> None:
    with pytest.raises(InvalidField, match=sentence) as caught:
        parse_messages(text)
    assert caught.value.field == "chat.messages_json"


def test_text_parts_are_joined_and_a_tool_call_needs_no_content() -> None:
    messages = parse_messages(
        json.dumps(
            [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            ]
        )
    )
    assert [message["content"] for message in messages] == ["ab", ""]


@pytest.mark.parametrize("text", ['{"messages": 1}', '{"bos_token": ""}', '{"a b": 1}', '{"x": []}', "[]", "{"])
def test_template_arguments_may_not_replace_what_the_router_passes(text: str) -> None:
    with pytest.raises(InvalidField):
        parse_template_arguments(text)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", "a\n{% if %}", "has an error in line 2"),
        ("tokenizer_config.json", "[1]", "cannot be read"),
        ("tokenizer_config.json", "{", "cannot be read"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_at_the_start(
    name: str, content: str, words: str, tmp_path: Path
) -> None:
    (make_model_dir(tmp_path) / name).write_text(content)
    with pytest.raises(BadTemplate, match=words) as caught:
        ChatTemplate.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
