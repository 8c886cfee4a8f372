"""One call's choices: their requests, their answers, and the messages that tell the client of them.

Shared by Generate and GenerateStream. Owns the Call and closes it; reads the call's events in whole engine steps
and feeds the answers. Never tokenizes a prompt and never writes to the client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Sequence

from engine.types import FinishReason, Token, TokenLogprob
from protos import generation_pb2 as gpb
from router.actions import Emit, End, Outcome, RouterRequest, Times
from router.answer import Answer, Piece
from router.driver import Call
from router.metrics import Counts
from router.status import RequestError
from router.text.model import Prompt, TextModel
from router.trace import CallTrace
from router.validate import CheckedRequest, Chunking, choice_seed
from wire.codec import logprob_to_pb, to_duration

_FINISH_REASONS = {
    FinishReason.STOP: gpb.FINISH_REASON_STOP,
    FinishReason.LENGTH: gpb.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: gpb.FINISH_REASON_TOOL_CALLS,
    FinishReason.CANCELLED: gpb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: gpb.FINISH_REASON_ERROR,
}


AT_ONCE = Chunking()


class Generation:
    """Close it, always."""

    def __init__(
        self,
        checked: CheckedRequest,
        prompt: Prompt,
        model: TextModel,
        call: Call,
        counts: Counts,
        trace: CallTrace,
    ) -> None:
        self.request_id = checked.request_id or uuid.uuid4().hex
        self.model = model
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.begun = False  # the first word is there, and with it all that Started tells
        self._checked = checked
        self._prompt = prompt
        self._call = call
        self._counts = counts
        self._trace = trace
        self._cached_tokens = 0
        self._seed = 0
        self._outcomes: dict[int, Outcome] = {}
        self._error: RequestError | None = None
        self._submitted_at = time.monotonic()
        self._last_at: dict[int, float] = {}  # when each choice's last tokens came
        self._submitted = 0
        self._under_way = False
        self._running = checked.params.n
        self._answers = [
            Answer(model.tokenizer, prompt.token_ids, checked.params, checked.output, checked.resume)
            for _ in range(checked.params.n)
        ]

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self._prompt.token_ids

    @property
    def over(self) -> bool:
        return self._running == 0

    def submit(self, deadline: float) -> None:
        """Choice 0 mints the seed where the client gave none; the others' derive from it. Raises Rejected."""
        checked = self._checked
        if self._answers[0].stopped is not None:
            raise RequestError("INVALID_ARGUMENT", "the resumed tokens end the answer already", field="resume")
        for index in range(checked.params.n):
            params = dataclasses.replace(
                checked.params,
                n=1,
                seed=checked.params.seed if index == 0 else choice_seed(self._seed, index),
                prompt_logprobs=checked.params.prompt_logprobs if index == 0 else None,
            )
            request = RouterRequest(
                self._prompt.token_ids, params, deadline, checked.namespace, checked.resume, self.request_id,
                self._trace.traceparent,
            )  # fmt: skip
            self._call.submit(request)
            self._submitted += 1
            if index == 0:
                self._seed = self._call.seed(0)
        self._under_way = True
        self._counts.started(len(self._prompt.token_ids))

    async def pieces(self, chunking: Chunking) -> Sequence[tuple[int, Piece]]:
        """What is new, by choice, once there is enough to tell or it took too long.

        Raises RequestError when a choice failed, after everything that came before.
        """
        if self._error is None:
            await self._receive()
        if not self._enough(chunking.min_tokens):
            await self._receive_more(chunking)
        if not self.begun:
            self._keep_all()  # until choice 0 has brought the prompt's logprobs, nobody could read the others
        pieces = [(index, answer.take()) for index, answer in enumerate(self._answers) if self.begun and answer.pending]
        if self._error is not None and not pieces:
            raise self._error
        return pieces

    def consumed(self, index: int) -> None:
        """The client has what this choice's pieces held."""
        self._call.consumed(index, self._answers[index].tokens)

    def close(self) -> None:
        self._call.close()
        self._counts.left(self._submitted - len(self._outcomes))
        self._submitted = len(self._outcomes)
        if not self._under_way:
            return  # it was refused: whoever says so ends the trace too
        usage = (len(self._prompt.token_ids), sum(answer.tokens for answer in self._answers), self._cached_tokens)
        failed = [outcome.code for outcome in self._outcomes.values() if outcome.code != "OK"]
        error = failed[0] if failed else "" if self.over else "CANCELLED"
        outcomes = [*self._outcomes.values()]
        self._trace.ended(self.request_id, self._submitted_at, outcomes, self._longest(), usage, error)

    # ---- messages -------------------------------------------------------------------------------------------

    def shows(self, piece: Piece) -> bool:
        """Whether the client would learn anything from this piece: text may be held back."""
        output = self._checked.output
        ids = output.return_token_ids and piece.tokens
        return bool(piece.finish_reason or piece.logprobs or ids or (output.return_text and piece.text))

    def choice(self, index: int, piece: Piece) -> gpb.Choice:
        output = self._checked.output
        choice = gpb.Choice(
            index=index,
            text=piece.text if output.return_text else "",
            token_ids=piece.tokens if output.return_token_ids else (),
            logprobs=map(logprob_to_pb, piece.logprobs) if piece.logprobs else None,
        )
        if piece.finish_reason is not None:
            choice.finish_reason = _FINISH_REASONS[piece.finish_reason]
        if piece.stop_text is not None:
            choice.stop_match.text = piece.stop_text
        elif piece.stop_token_id is not None:
            choice.stop_match.token_id = piece.stop_token_id
        return choice

    def event(
        self,
        started: gpb.GenerateStreamResponse.Started | None = None,
        delta: gpb.Choice | None = None,
        finished: gpb.GenerateStreamResponse.Finished | None = None,
    ) -> gpb.GenerateStreamResponse:
        return gpb.GenerateStreamResponse(request_id=self.request_id, started=started, delta=delta, finished=finished)

    def started(self) -> gpb.GenerateStreamResponse.Started:
        return gpb.GenerateStreamResponse.Started(
            prompt_tokens=len(self._prompt.token_ids),
            cached_prompt_tokens=self._cached_tokens,
            prompt_logprobs=map(logprob_to_pb, self.prompt_logprobs),
            seed=self._seed,
        )

    def usage(self) -> gpb.Usage:
        return gpb.Usage(
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=sum(answer.tokens for answer in self._answers),
            cached_prompt_tokens=self._cached_tokens,
        )

    def timing(self) -> gpb.Timing:
        """Of the choice that took longest; the time to the first token is the first one's of any choice."""
        longest = self._longest()
        times = [outcome.times for outcome in self._outcomes.values()]
        firsts = [each.first_token for each in times if each.first_token is not None]
        return gpb.Timing(
            queue=to_duration(longest.queued + longest.decode_queued),
            prefill=to_duration(longest.prefill),
            kv_transfer=to_duration(longest.transfer),
            decode=to_duration(longest.decode),
            time_to_first_token=to_duration(min(firsts, default=0.0)),
        )

    # ---- inside ---------------------------------------------------------------------------------------------

    def _longest(self) -> Times:
        times = [outcome.times for outcome in self._outcomes.values()]
        return max(times, key=lambda each: each.prefill + each.transfer + each.decode, default=Times())

    def _enough(self, tokens: int) -> bool:
        if self._running == 0 or self._error is not None:
            return True
        return max(answer.pending for answer in self._answers) >= tokens

    async def _receive_more(self, chunking: Chunking) -> None:
        try:
            async with asyncio.timeout(chunking.max_delay):
                while not self._enough(chunking.min_tokens):
                    self._keep_all()  # it asked to wait: it does not lag, however small its window
                    await self._receive()
        except TimeoutError:
            pass  # what there is will do

    def _keep_all(self) -> None:
        """What is kept here for the client holds no choice back."""
        for index in range(self._submitted):
            self.consumed(index)

    async def _receive(self) -> None:
        """Everything that has arrived, into the answers."""
        arrived: dict[int, list[Token]] = {}
        ended: dict[int, Outcome] = {}
        for index, event in await self._call.events():
            if isinstance(event, End):
                ended[index] = event.outcome
                arrived.setdefault(index, [])
            elif (tokens := arrived.get(index)) is not None:
                tokens += event.tokens
            else:
                arrived[index] = list(event.tokens)
                if not self.begun:
                    self._note_first(index, event)
        for index, tokens in sorted(arrived.items()) if len(arrived) > 1 else arrived.items():
            self._extend(index, tokens, ended.get(index))

    def _extend(self, index: int, tokens: Sequence[Token], outcome: Outcome | None) -> None:
        answer = self._answers[index]
        if tokens:
            self._count(index, len(tokens))
        failed = outcome is not None and outcome.code != "OK"
        answer.extend(tokens, None if failed else outcome)
        if outcome is None:
            if answer.stopped is not None:
                self._call.stop(index)
            return
        self._outcomes[index] = outcome
        self._counts.ended(outcome, answer.tokens, time.monotonic() - self._submitted_at)
        if failed and answer.stopped is None:
            self._error = RequestError.from_outcome(outcome)
        elif failed:  # a stop string had ended it already: whatever went wrong after that is nobody's loss
            answer.extend((), dataclasses.replace(outcome, code="OK", finish_reason=FinishReason.STOP))
        self._running -= answer.ended

    def _count(self, index: int, tokens: int) -> None:
        now = time.monotonic()
        if (last := self._last_at.get(index)) is None:
            self._counts.first_token(now - self._submitted_at)
        self._counts.emitted(tokens, None if last is None else now - last)
        self._last_at[index] = now

    def _note_first(self, index: int, emit: Emit) -> None:
        """Prompt logprobs come with choice 0 alone; without them any choice may be the first."""
        if index != 0 and self._checked.params.prompt_logprobs is not None:
            return
        self.begun = True
        self._cached_tokens = emit.cached_tokens
        self.prompt_logprobs = emit.prompt_logprobs


def joined(pieces: Sequence[Piece]) -> Piece:
    """One piece that tells what all of them told."""
    whole = Piece()
    for piece in pieces:
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.logprobs += piece.logprobs
        whole.finish_reason = piece.finish_reason
        whole.stop_text, whole.stop_token_id = piece.stop_text, piece.stop_token_id
    return whole
