"""What users may give as a prompt, into token ids: text, token ids, or a chat through the model's template.

Blocking and pure. Reuses the router's tokenizer, template and checks; what a user got wrong is a PagewireError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.types import InvalidField, SamplingParams
from pagewire.answers import PagewireError
from router.text.chat import check_messages, check_template_arguments
from router.text.model import Prompt, TextModel, check_size
from router.validate import check_token_ids

TokenIds = Sequence[int]
PromptLike = str | TokenIds | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


def listed(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """One prompt becomes a list of one. Integers alone are the token ids of one prompt."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    each: list[Any] = list(prompts)
    return [each] if each and all(isinstance(one, int) for one in each) else each


def read_prompt(prompt: PromptLike, text: TextModel) -> Prompt:
    try:
        return _read(prompt, text)
    except InvalidField as error:
        raise wrong(error) from error


def read_chat(messages: Messages, text: TextModel, arguments: Mapping[str, Any]) -> Prompt:
    """The template writes its own special tokens, so encoding adds none."""
    try:
        if text.template is None:
            raise InvalidField("messages", f"{text.names[0]} has no chat template: use generate() with text instead")
        rendered = text.template.render(check_messages(messages), check_template_arguments(dict(arguments)))
        check_size("messages", rendered)
        return Prompt(text.tokenizer.encode(rendered, add_special_tokens=False), rendered)
    except InvalidField as error:
        raise wrong(error) from error


def check_params(params: Any, text: TextModel) -> SamplingParams:
    """What only a model's vocabulary can tell."""
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise PagewireError(
            "INVALID_ARGUMENT", f"sampling_params must be SamplingParams, got a {kind}", "sampling_params"
        )
    try:
        check_token_ids("stop_token_ids", params.stop_token_ids, text.vocab_size)
        check_token_ids("logit_bias", tuple(params.logit_bias), text.vocab_size)
    except InvalidField as error:
        raise wrong(error) from error
    return params


def wrong(error: InvalidField) -> PagewireError:
    sentence = str(error).replace("chat.messages_json", "messages").replace("chat.template_kwargs_json", "arguments")
    return PagewireError("INVALID_ARGUMENT", sentence, error.field)


def _read(prompt: PromptLike, text: TextModel) -> Prompt:
    shown = None
    if isinstance(prompt, Mapping):
        if others := prompt.keys() - {"prompt", "prompt_token_ids"}:
            raise InvalidField(
                "prompt", f"a prompt has prompt or prompt_token_ids, and not {', '.join(sorted(others))}"
            )
        if "prompt_token_ids" in prompt:
            shown, prompt = prompt.get("prompt"), prompt["prompt_token_ids"]
        else:
            prompt = prompt.get("prompt", "")
    if isinstance(prompt, str):
        check_size("prompt", prompt)
        shown, prompt = prompt, text.tokenizer.encode(prompt, add_special_tokens=True)
    return Prompt(_token_ids(prompt, text.vocab_size), shown)


def _token_ids(ids: Any, vocab_size: int) -> TokenIds:
    if not isinstance(ids, Sequence) or not all(isinstance(each, int) and each >= 0 for each in ids):
        raise InvalidField("prompt", "a prompt must be a text or token ids, which are whole numbers from 0 on")
    if not ids:
        raise InvalidField("prompt", "the prompt is empty: it has no tokens")
    return check_token_ids("prompt_token_ids", ids, vocab_size)
