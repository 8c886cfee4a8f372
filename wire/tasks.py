"""The end of tasks that somebody else started. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them and waits for their end. Raises the first error of one that failed.

    A cancellation of the caller meanwhile is the caller's: it is raised, where awaiting each task and suppressing its
    CancelledError would swallow it, and the caller would run on for ever.
    """
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)
    for task in ending:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
