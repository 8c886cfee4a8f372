"""One choice of an answer: tokens go in as they arrive, what the client may see of them comes out.

Owns the choice's detokenizer and stop strings. It is a function of the tokens: a resumed answer replays the
tokens that the client holds and shows nothing of them again. Never waits and never talks to a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.types import FinishReason, SamplingParams, Token, TokenLogprob
from router.actions import Outcome
from router.text.stops import StopStrings
from router.text.tokenizer import Tokenizer
from router.validate import OutputOptions


@dataclass(slots=True)
class Piece:
    """What is new since the last piece. `finish_reason` is set on the last one, with what matched."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    stop_token_id: int | None = None


class Answer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        output: OutputOptions,
        resume: Sequence[int] = (),
    ) -> None:
        self._params = params
        self._prompt_only = output.prompt_only
        self._detokenizer = tokenizer.detokenizer(prompt_ids, output.keep_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_in_output)
        self._piece = Piece()
        self.tokens = 0  # of the whole answer, resumed ones included
        self.stopped: str | None = None  # the stop string that ended it
        self.ended = False
        self._show_all(resume)
        self._piece = Piece()
        if output.echo_prompt and not resume:
            self._piece = Piece(tokenizer.decode(prompt_ids, output.keep_special_tokens), list(prompt_ids))

    def extend(self, tokens: Sequence[Token], outcome: Outcome | None = None) -> None:
        """`outcome` says that these tokens are the last. What follows a stop string is dropped."""
        if self._prompt_only:
            tokens = ()
            outcome = outcome and replace(outcome, finish_reason=FinishReason.LENGTH, stop_token_id=None)
        ids = [token.token_id for token in tokens]
        hidden = self._hides_last(tokens, outcome)
        before = self.tokens
        if self.stopped is None:
            self._show_all(ids[:-1] if hidden else ids)
        if self.stopped is None:
            self.tokens += hidden
        taken = self.tokens - before  # all, or as many as there are up to a stop string
        self._piece.tokens += ids[:taken]
        self._piece.logprobs += [token.logprob for token in tokens[:taken] if token.logprob is not None]
        if outcome is not None:
            self._end(outcome)

    @property
    def pending(self) -> int:
        """Tokens that the next piece would bring; an end counts as one."""
        return len(self._piece.tokens) + (self._piece.finish_reason is not None)

    def take(self) -> Piece:
        piece, self._piece = self._piece, Piece()
        return piece

    def _hides_last(self, tokens: Sequence[Token], outcome: Outcome | None) -> bool:
        """The text of the end token or stop token that ended the answer is not part of it unless asked for."""
        if outcome is None or not tokens or self._params.include_stop_in_output:
            return False
        return outcome.code == "OK" and outcome.finish_reason is FinishReason.STOP

    def _show_all(self, token_ids: Sequence[int]) -> None:
        """Up to a stop string; the token that completes one is the last."""
        if not self._params.stop:
            self._piece.text += self._detokenizer.steps(token_ids)
            self.tokens += len(token_ids)
            return
        for token_id in token_ids:
            self._show(token_id)
            if self.stopped is not None:
                return

    def _show(self, token_id: int) -> None:
        text = self._detokenizer.step(token_id)
        self.tokens += 1
        if self.tokens <= self._params.min_tokens:
            self._piece.text += self._stops.skip(text)
        else:
            passed = self._stops.feed(text)
            self._piece.text += passed.text
            self.stopped = passed.stop

    def _end(self, outcome: Outcome) -> None:
        self.ended = True
        if self.stopped is None:
            passed = self._stops.feed(self._detokenizer.finish())
            self.stopped = passed.stop
            self._piece.text += passed.text + self._stops.finish()
        self._piece.finish_reason = FinishReason.STOP if self.stopped is not None else outcome.finish_reason
        self._piece.stop_text = self.stopped
        if self.stopped is None:
            self._piece.stop_token_id = outcome.stop_token_id
