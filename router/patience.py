"""How long a client may take nothing of what is written to it, for either door.

One timer looks after all writes of a call: a timer for each would cost as much as the message. Knows no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

MOST_WRITE_S = 60.0  # the dispatcher ends a request whose client lags much sooner; this ends the call itself
LOOKS = 4  # times in which a write that lasts too long is looked at


class TooSlow(Exception):
    """The client has read nothing for MOST_WRITE_S."""


class Patience:
    """`async with` around the writes of one call: ends them, and raises TooSlow, when one lasts too long."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._since: float | None = None  # when the write that lasts began
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise TooSlow(f"the client has read nothing for {MOST_WRITE_S:g} s") from timeout

    async def during(self, write: Awaitable[None]) -> None:
        self._since = self._loop.time()
        await write
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= MOST_WRITE_S:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(MOST_WRITE_S / LOOKS, self._look)
