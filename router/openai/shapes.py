"""Answers in OpenAI's words: one writer for chats and one for completions, each with its whole and its chunk.

Pure: pieces of generation.py go in, what json.dumps takes comes out. Knows no request and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types import FinishReason, TokenLogprob
from protos import generation_pb2 as gpb
from router.answer import Piece
from router.generation import Generation
from router.text.tokenizer import Tokenizer

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    each = [generation.usage() for generation in generations]
    prompt = sum(one.prompt_tokens for one in each)
    completion = sum(one.completion_tokens for one in each)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_prompt_tokens for one in each)},
    }


def stage_times(generations: Sequence[Generation]) -> dict[str, float]:
    """Beside the usage, in milliseconds: what the stages of the prompt that took longest took."""

    def whole(timing: gpb.Timing) -> float:
        return sum(each.ToNanoseconds() for each in (timing.queue, timing.prefill, timing.kv_transfer, timing.decode))

    timing = max((generation.timing() for generation in generations), key=whole)
    stages = ("queue", "prefill", "kv_transfer", "decode", "time_to_first_token")
    return {f"{stage}_ms": round(getattr(timing, stage).ToNanoseconds() / 1e6, 3) for stage in stages}


class ChatShape:
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    prompt_field = "messages"
    prompt_in_choice = echoes_logprobs = False

    def __init__(self, tokenizer: Tokenizer, logprobs: bool, token_ids: bool, length_field: str = "max_tokens") -> None:
        self.length_field = length_field  # by which name the answer's length was asked for
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(index, "message", message, piece)

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        """The role comes with the first content: clients take the first chunk for the first token."""
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if piece.text:
            delta["content"] = piece.text
        return self._choice(index, "delta", delta, piece)

    def of_prompt(self, generation: Generation) -> dict[str, Any]:
        """What an answer, or its first chunk, says of its prompt if asked; chats have it beside their choices."""
        return _of_prompt(self._tokenizer, generation, self._token_ids)

    def _choice(self, index: int, name: str, content: dict[str, Any], piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, name: content, "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = {"content": [self._token(each) for each in piece.logprobs], "refusal": None}
        choice["finish_reason"] = _REASONS[piece.finish_reason] if piece.finish_reason else None
        if self._token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._candidate(each.token_id, each.logprob) for each in token.top]
        return {**self._candidate(token.token_id, token.logprob), "top_logprobs": top}

    def _candidate(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        """`bytes` is null for a token that is a part of a character only."""
        text = self._tokenizer.decode([token_id], keep_special_tokens=True)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class CompletionShape:
    kind = chunk_kind = "text_completion"
    id_prefix, prompt_field, length_field = "cmpl-", "prompt", "max_tokens"
    prompt_in_choice = True

    def __init__(
        self, tokenizer: Tokenizer, logprobs: bool, token_ids: bool, echo: bool, prompt_logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._prompt_logprobs = prompt_logprobs
        self.echoes_logprobs = echo and logprobs
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = self._lists(index, piece.logprobs)
        choice["finish_reason"] = _REASONS[piece.finish_reason] if piece.finish_reason else None
        if self._token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        return self.choice(index, piece)

    def of_prompt(self, generation: Generation) -> dict[str, Any]:
        """As ChatShape's; completions have it in each choice. An echo has its logprobs among those of the answer."""
        return _of_prompt(self._tokenizer, generation, self._token_ids, self._prompt_logprobs)

    def _lists(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [self._text(each.token_id) for each in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        top = [self._top(token) for token in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float | None] | None:
        """The best, and behind them the token itself where it is none of them."""
        if not token.top:
            return None
        best: dict[str, float | None] = {self._text(each.token_id): each.logprob for each in token.top}
        return best | {self._text(token.token_id): token.logprob}

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], keep_special_tokens=True)


Shape = ChatShape | CompletionShape


def _of_prompt(tokenizer: Tokenizer, generation: Generation, token_ids: bool, logprobs: bool = True) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if token_ids:
        told["prompt_token_ids"] = list(generation.prompt_ids)
    if logprobs and generation.prompt_logprobs:
        told["prompt_logprobs"] = prompt_logprobs(tokenizer, generation.prompt_logprobs)
    return told


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """As vLLM has them: null for the first token, which nothing predicts, then token id to its logprob and rank."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.decode([token_id], keep_special_tokens=True)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    answer: list[dict[str, Any] | None] = []
    for token in logprobs:
        if token.logprob is None:
            answer.append(None)
            continue
        entries = {each.token_id: entry(each.token_id, each.logprob, rank) for rank, each in enumerate(token.top, 1)}
        entries[token.token_id] = entry(token.token_id, token.logprob, token.rank)
        answer.append({str(token_id): value for token_id, value in entries.items()})
    return answer
