"""What this router has done since it started, counted; one log line every ten seconds in which something happened."""

from __future__ import annotations

import asyncio
from collections import Counter

from router.actions import Outcome
from wire.logs import get_logger

log = get_logger("metrics")

REPORT_S = 10.0


class Counts:
    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.ends: Counter[str] = Counter()  # choices by status code

    def started(self, prompt_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens

    def ended(self, outcome: Outcome, tokens: int) -> None:
        self.ends[outcome.code] += 1
        self.completion_tokens += tokens
        if outcome.code == "INTERNAL":  # the client has the same error id
            log.error("request_failed", sentence=outcome.sentence, **outcome.facts)

    async def report(self) -> None:
        """Logs until cancelled."""
        before = (0, 0)
        while True:
            await asyncio.sleep(REPORT_S)
            if (now := (self.requests, self.completion_tokens)) != before:
                rate = (now[1] - before[1]) / REPORT_S
                log.info(
                    "served",
                    requests=self.requests,
                    prompt_tokens=self.prompt_tokens,
                    completion_tokens=self.completion_tokens,
                    tokens_per_second=round(rate, 1),
                    ends=dict(self.ends),
                )
                before = now
