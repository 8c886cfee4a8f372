"""One call's span: from its first check to its last token, with what OpenTelemetry's conventions for generative AI say.

Its workers' spans stand under it. Owns the span and ends it once; knows no exporter, and no word of prompt or answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from router.actions import Outcome, Times
from router.validate import ChatPrompt, CheckedRequest
from wire.tracing import Attributes, Incoming, Tracing


class CallTrace:
    def __init__(self, tracing: Tracing, checked: CheckedRequest, model: str, incoming: Incoming) -> None:
        self._tracing = tracing
        self._model = model
        operation = "chat" if isinstance(checked.source, ChatPrompt) else "text_completion"
        attributes = _asked(checked, operation, model) if tracing.on else {}
        self._span = tracing.begin(f"{operation} {model}", incoming, attributes)
        self._began = time.monotonic()
        self._over = False

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def refused(self, code: str) -> None:
        self._end({}, code)

    def ended(
        self,
        request_id: str,
        submitted: float,
        outcomes: Sequence[Outcome],
        times: Times,
        usage: tuple[int, int, int],
        error: str,
    ) -> None:
        """`submitted` is time.monotonic()'s, `times` those of the choice that took longest, `usage` prompt, completion
        and cached tokens."""
        if self._over or not self._tracing.on:
            return
        prompt, completion, cached = usage
        self._tracing.record("route", self.traceparent, self._began, submitted + times.placed, {})
        attributes: dict[str, str | int | float | bool | list[str]] = {
            "gen_ai.response.id": request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [outcome.finish_reason.name.lower() for outcome in outcomes],
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": completion,
            "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.latency.e2e": time.monotonic() - self._began,
            "gen_ai.latency.time_in_queue": times.queued + times.decode_queued,
            "gen_ai.latency.time_in_model_prefill": times.prefill,
            "gen_ai.latency.time_in_model_decode": times.decode,
        }
        if times.first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = times.first_token
        self._end(attributes, error)

    def _end(self, attributes: Attributes, error: str) -> None:
        if not self._over:
            self._over = True
            self._span.end(attributes, error)


def _asked(checked: CheckedRequest, operation: str, model: str) -> Attributes:
    params = checked.params
    given: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pagewire",
        "gen_ai.request.model": model,
        "gen_ai.request.id": checked.request_id,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed if params.seed is None or params.seed < 2**63 else str(params.seed),
    }
    return {name: value for name, value in given.items() if value is not None}
