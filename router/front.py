"""What every door does with a checked request: its prompt becomes tokens, and its choices are submitted.

The gRPC service and the HTTP door call this and nothing beside it, so that one request gets one treatment whichever
way it came. Knows no message of either; checks nothing that validate.py could.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.types import InvalidField
from router.admission import Rejected, limit_of
from router.driver import Call, Driver
from router.generation import Generation
from router.metrics import Counts
from router.status import RequestError
from router.text.model import Prompt, TextModel
from router.trace import CallTrace
from router.validate import ChatPrompt, CheckedRequest, PromptSource, TextPrompt, TokenPrompt, check_prompt, invalid
from router.workers import Workers
from wire.tracing import NOTHING, OFF, Incoming, Tracing


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. A client that sets no deadline gets the default; none gets more than the maximum."""

    default: float = 600.0
    maximum: float = 3600.0

    def of(self, remaining: float | None) -> float:
        return self.default if remaining is None else max(0.0, min(remaining, self.maximum))


class Front:
    """`model` gives the served model, or raises RequestError while it is being prepared."""

    def __init__(
        self,
        model: Callable[[], TextModel],
        driver: Driver,
        counts: Counts,
        deadlines: Deadlines,
        tracing: Tracing = OFF,
    ) -> None:
        self.model = model
        self._tracing = tracing
        self._driver = driver
        self._counts = counts
        self._deadlines = deadlines

    @property
    def workers(self) -> Workers:
        return self._driver.dispatcher.workers

    async def begin(
        self, checked: CheckedRequest, model: TextModel, remaining: float | None, incoming: Incoming = NOTHING
    ) -> Generation:
        """Tokenizes and submits every choice. Whoever gets the generation closes it. `remaining` is in seconds."""
        trace = CallTrace(self._tracing, checked, model.names[0], incoming)
        try:
            with self.refusals():
                return await self._begin(checked, model, self._deadlines.of(remaining), trace)
        except RequestError as error:
            trace.refused(error.code)
            raise
        except asyncio.CancelledError:  # the client left while its prompt was tokenized
            trace.refused("CANCELLED")
            raise

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts a request that is refused before it has started: by its fields, its prompt, or for want of room."""
        try:
            yield
        except RequestError as error:
            self._counts.refused(error.code)
            raise
        except InvalidField:
            self.unreadable()
            raise

    def unreadable(self) -> None:
        """Counts one that its door could not read: its bytes, its JSON or its types are no request."""
        self._counts.refused("INVALID_ARGUMENT")

    async def _begin(self, checked: CheckedRequest, model: TextModel, deadline: float, trace: CallTrace) -> Generation:
        prompt = await self.encode(checked.source, model)
        check_prompt(prompt, checked.params)
        generation = Generation(checked, prompt, model, Call(self._driver), self._counts, trace)
        submitted = False
        try:
            generation.submit(deadline)
            submitted = True
        except Rejected as error:
            raise RequestError.from_rejected(error) from error
        finally:
            if not submitted:
                generation.close()
        return generation

    async def encode(self, source: PromptSource, model: TextModel, add_special_tokens: bool = True) -> Prompt:
        try:
            match source:
                case TokenPrompt():
                    return Prompt(source.token_ids)
                case TextPrompt():
                    return await model.encode_text(source.text, add_special_tokens)
                case ChatPrompt():
                    return await model.encode_chat(source.messages, source.arguments)
        except InvalidField as error:
            raise invalid(error) from error
        except Rejected as error:
            raise RequestError.from_rejected(error) from error

    def max_model_len(self, model: TextModel) -> int:
        """What the workers allow, or the model's own length as long as none is there."""
        limit = limit_of(self.workers)
        return limit.tokens if limit is not None else model.max_model_len
