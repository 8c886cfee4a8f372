"""The served model as the router knows it: its names, tokenizer, chat template and sampling defaults.

Everything comes from one local directory. Rendering and encoding run in a small executor with a bounded queue, so
that a long prompt never holds up the event loop and many of them are refused rather than hoarded. Weights are the
workers' business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.types import InvalidField, SamplingParams
from router.admission import Overloaded
from router.text.chat import ChatTemplate, Message
from router.text.tokenizer import NoTokenizer, Tokenizer
from wire.logs import get_logger

log = get_logger("text")

MAX_PROMPT_BYTES = 2**20
TEXT_THREADS = 2
MAX_WAITING_TEXTS = 256

T = TypeVar("T")

# What generation_config.json may set, by the field of SamplingParams that it means.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is None where the client sent token ids."""

    token_ids: Sequence[int]
    text: str | None = None


class TextModel:
    """`names` are what clients may call it, the first one is its id. `tokenizer` is the directory of another tokenizer,
    whose chat template comes before the model's. `own_defaults`: generation_config.json says how to sample."""

    def __init__(
        self, names: Sequence[str], directory: Path, tokenizer: Path | None = None, own_defaults: bool = True
    ) -> None:
        self.names = tuple(names)
        self.directory = directory
        self.tokenizer = Tokenizer.load(tokenizer or directory)
        self.template = (ChatTemplate.load(tokenizer) if tokenizer else None) or ChatTemplate.load(directory)
        config = _read_json(directory / "config.json")
        self.vocab_size: int = config.get("vocab_size") or self.tokenizer.vocab_size
        self.max_model_len: int = config.get("max_position_embeddings") or 0  # 0: only the workers know
        told = _read_json(directory / "generation_config.json") if own_defaults else {}
        self.defaults = sampling_defaults(told)
        self._executor = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._waiting = 0

    async def encode_text(self, text: str, add_special_tokens: bool = True) -> Prompt:
        check_size("text", text)
        return Prompt(await self._run(lambda: self.tokenizer.encode(text, add_special_tokens)), text)

    async def encode_chat(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> Prompt:
        """The template writes its own special tokens, so encoding adds none."""
        template = self.template
        if template is None:
            raise InvalidField("chat", f"{self.names[0]} has no chat template: send text or token_ids instead")

        def work() -> Prompt:
            text = template.render(messages, arguments)
            check_size("chat", text)
            return Prompt(self.tokenizer.encode(text, add_special_tokens=False), text)

        return await self._run(work)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._run(lambda: self.tokenizer.decode(token_ids, keep_special_tokens=True))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= MAX_WAITING_TEXTS:
            raise Overloaded(
                f"{self._waiting} prompts wait to be tokenized, the most that this router takes", retry_after=1.0
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting -= 1


def check_size(field: str, text: str) -> None:
    """Raises InvalidField for a text that is too large to be worth tokenizing, or that is no text."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise InvalidField(field, f"{field} holds half of a surrogate pair, which is no character") from error
    if size > MAX_PROMPT_BYTES:
        raise InvalidField(field, f"{field} must have at most {MAX_PROMPT_BYTES} bytes, got {size}")


def sampling_defaults(generation_config: Mapping[str, Any]) -> Mapping[str, float]:
    """The model's own defaults that are in range; an unusable one is named in the log and left out."""
    defaults: dict[str, float] = {}
    for name, field in _DEFAULTS.items():
        value = generation_config.get(name)
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        fields: dict[str, Any] = {field: value}
        try:
            SamplingParams(**fields)
        except InvalidField as error:
            log.warning("model_default_ignored", file="generation_config.json", error=str(error))
            continue
        defaults[field] = value
    return defaults


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise NoTokenizer(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
