"""The HTTP server that every process has, before any application sees a request."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from wire.http import MAX_HEAD_BYTES, serve
from wire.ports import listen
from wire.security import Security


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def answers(*parts: bytes) -> bytes:
    """What comes for these bytes, each sent when the one before it was read, until the server closes."""
    with contextlib.closing(listen("127.0.0.1", 0, Security())) as listening:
        serving = asyncio.create_task(serve(app, listening, Security()))
        reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def test_headers_without_an_end_are_refused_with_the_size_that_is_allowed() -> None:
    endless = [b"x" * 2**14] * (MAX_HEAD_BYTES // 2**14 + 2)
    said = await answers(b"GET / HTTP/1.1\r\nx-a: ", *endless)
    assert said.startswith(b"HTTP/1.1 400 ") and b"at most 65536 bytes" in said


async def test_headers_that_come_in_pieces_and_one_request_after_another_are_served() -> None:
    one = [b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ", b"x" * 2**15, b"\r\n\r\n"]
    last = [b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-a: ", b"x" * 2**15, b"\r\n\r\n"]
    assert (await answers(*one, *one, *last)).count(b"HTTP/1.1 200 ") == 3
