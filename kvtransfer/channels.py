"""One gRPC channel per owner of blocks, opened by whoever needs it first and kept for the next pull.

Owns the channels and knows who uses each. Idle ones beyond a limit are closed, the least recently opened first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

MAX_CHANNELS = 64  # to different owners; idle ones beyond are closed

Connect = Callable[[str], grpc.aio.Channel]


class Channels:
    """`connect` opens a channel to an address; it raises OSError while certificates cannot be read."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._open: dict[str, tuple[grpc.aio.Channel, set[Any]]] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def take(self, address: str, user: Any) -> grpc.aio.Channel:
        """Open until `user` gives it back, and longer if there is room."""
        if address not in self._open:
            idle = [known for known, (_, users) in self._open.items() if not users]
            for known in idle[: max(0, len(self._open) - MAX_CHANNELS + 1)]:
                retiring = asyncio.create_task(self._open.pop(known)[0].close())
                self._retired.add(retiring)
                retiring.add_done_callback(self._retired.discard)
            self._open[address] = (self._connect(address), set())
        channel, users = self._open[address]
        users.add(user)
        return channel

    def give(self, address: str, user: Any) -> None:
        if address in self._open:
            self._open[address][1].discard(user)

    async def close(self) -> None:
        await asyncio.gather(*self._retired)
        for channel, _ in self._open.values():
            await channel.close()
        self._open.clear()
