"""The answer to one call, whole or as a stream of server-sent events, for one prompt or several.

Owns the call's generations from their submit to their close, whatever ends it: the last token, an error, or a client
that left, which is noticed at once, also while nothing is being sent. Credit goes back to a generation only for what
the connection has taken, so that a slow reader slows its own request.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answer import Piece
from router.front import Front
from router.generation import AT_ONCE, Generation, joined
from router.openai.errors import encoded, error_body
from router.openai.shapes import Shape, stage_times, usage
from router.patience import Patience, TooSlow
from router.status import RequestError
from router.text.model import TextModel
from router.validate import CheckedRequest
from wire.http import ABORT
from wire.logs import get_logger
from wire.tracing import Incoming

log = get_logger("openai")

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

Pieces = Sequence[tuple[int, Piece]]


class Reply(Response):
    """An ASGI response. Errors before its first byte are raised, for the border to answer."""

    def __init__(
        self,
        front: Front,
        model: TextModel,
        asked: Sequence[CheckedRequest],
        shape: Shape,
        request_id: str,
        incoming: Incoming,
    ) -> None:
        super().__init__()
        self._front = front
        self._model = model
        self._asked = asked
        self._shape = shape
        self._incoming = incoming
        self._generations: list[Generation] = []
        self._head = {
            "id": shape.id_prefix + request_id,
            "object": shape.kind,
            "created": int(time.time()),
            "model": model.names[0],
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._answer(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except TooSlow as error:
            log.info("slow_consumer", error=str(error))
            scope["extensions"][ABORT]["abort"]()
            await gone
        finally:
            work.cancel()
            gone.cancel()
            for generation in self._generations:  # in this turn of the loop: workers hear of it with the next message
                generation.close()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, send: Send) -> None:
        for asked in self._asked:
            try:
                self._generations.append(await self._front.begin(asked, self._model, None, self._incoming))
            except RequestError as error:
                if error.reason != "TOOLONG":
                    raise
                raise self._too_long(error) from error
        async with Patience() as patience:
            await self._send_answer(send, patience)

    def _too_long(self, error: RequestError) -> RequestError:
        """Under the name of the field that asks for too much."""
        if "max_tokens" not in error.facts:
            error.field = self._shape.prompt_field
            return error
        name = self._shape.length_field
        sentence = str(error).replace("max_tokens", name)
        return RequestError(error.code, sentence, field=name, reason=error.reason, facts=error.facts)

    async def _send_answer(self, send: Send, patience: Patience) -> None:
        """The whole answer at once."""
        parts: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        async with aclosing(self._pieces()) as news:
            async for number, pieces in news:
                for index, piece in pieces:
                    parts[number, index].append(piece)
                    self._generations[number].consumed(index)
        answer: dict[str, Any] = {**self._head, "choices": []}
        for (number, index), each in sorted(parts.items()):
            choice = self._shape.choice(self._place(number, index), self._whole(number, joined(each)))
            if self._shape.prompt_in_choice:
                choice |= self._shape.of_prompt(self._generations[number])
            answer["choices"].append(choice)
        if not self._shape.prompt_in_choice:
            answer |= self._shape.of_prompt(self._generations[0])
        answer["usage"] = usage(self._generations)
        answer["pagewire"] = stage_times(self._generations)
        body = encoded(answer)
        await _start(send, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
        await patience.during(_send(send, body, more=False))

    def _whole(self, number: int, first: Piece) -> Piece:
        """A choice's first piece, or all of it, with the logprobs of the prompt that it echoes."""
        if self._shape.echoes_logprobs:
            first.logprobs[:0] = self._generations[number].prompt_logprobs
        return first

    def _place(self, number: int, index: int) -> int:
        """A choice's index in the answer: all choices of the first prompt come first."""
        return number * self._asked[0].params.n + index

    async def _pieces(self) -> AsyncGenerator[tuple[int, Pieces]]:
        """What is new, with the number of its prompt, until every answer has ended."""
        if len(self._generations) == 1:
            generation = self._generations[0]
            while not generation.over:
                yield 0, await generation.pieces(AT_ONCE)
            return
        async with AsyncExitStack() as stack:
            waits: dict[asyncio.Future[Pieces], int] = {}
            stack.push_async_callback(_cancelled, waits)
            for number, generation in enumerate(self._generations):
                waits[asyncio.ensure_future(generation.pieces(AT_ONCE))] = number
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    number = waits.pop(future)
                    yield number, future.result()
                    if not self._generations[number].over:
                        waits[asyncio.ensure_future(self._generations[number].pieces(AT_ONCE))] = number


class Stream(Reply):
    """Server-sent events: chunks as tokens come, the usage alone if asked for, [DONE]."""

    def __init__(
        self,
        front: Front,
        model: TextModel,
        asked: Sequence[CheckedRequest],
        shape: Shape,
        request_id: str,
        incoming: Incoming,
        *,
        include_usage: bool,
        usage_always: bool,
    ) -> None:
        super().__init__(front, model, asked, shape, request_id, incoming)
        self._head["object"] = shape.chunk_kind
        self._include_usage = include_usage
        self._usage_always = usage_always
        self._begun: set[int] = set()  # choices that have had their first chunk
        # What every later chunk begins and ends with, around its one choice.
        self._before = b"data: " + encoded(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    async def _send_answer(self, send: Send, patience: Patience) -> None:
        started = False
        try:
            async with aclosing(self._pieces()) as news:
                async for number, pieces in news:
                    if data := b"".join(self._event(number, index, piece) for index, piece in pieces):
                        if not started:
                            started = True
                            await _start(send, *EVENT_STREAM)
                        await patience.during(_send(send, data))
                    for index, _ in pieces:
                        self._generations[number].consumed(index)
        except RequestError as error:
            if not started:
                raise
            await patience.during(_send(send, _event(error_body(error)) + DONE, more=False))
            return
        last = b""
        if self._include_usage:
            totals = {"usage": usage(self._generations), "pagewire": stage_times(self._generations)}
            last = _event({**self._head, "choices": [], **totals})
        await patience.during(_send(send, last + DONE, more=False))

    def _event(self, number: int, index: int, piece: Piece) -> bytes:
        """Nothing where the client would learn nothing: text may be held back."""
        if not self._generations[number].shows(piece):
            return b""
        place = self._place(number, index)
        if place not in self._begun:
            self._begun.add(place)
            return self._first_event(number, place, piece)
        choice = encoded(self._shape.chunk(place, piece, first=False))
        if self._usage_always:
            return b"".join((self._before, choice, b'],"usage":', encoded(usage(self._generations)), b"}\n\n"))
        return b"".join((self._before, choice, self._after))

    def _first_event(self, number: int, place: int, piece: Piece) -> bytes:
        choice = self._shape.chunk(place, self._whole(number, piece), first=True)
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._shape.prompt_in_choice:
            choice |= self._shape.of_prompt(self._generations[number])
        elif place == 0:
            chunk |= self._shape.of_prompt(self._generations[number])
        if self._include_usage:
            chunk["usage"] = usage(self._generations) if self._usage_always else None
        return _event(chunk)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


async def _start(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [*headers]})


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    """Returns when the connection has taken it, which a client that does not read prevents."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(waits: dict[asyncio.Future[Pieces], int]) -> None:
    for future in waits:
        future.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
