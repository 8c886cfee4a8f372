"""HTTP/1.1 for load: connections that are kept and reused, a body that is read as it arrives. Parsing is httptools'.

A client library would stand between the bytes and the clock, and wait for its own pool. Knows no OpenAI. It follows no
redirect and no proxy.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httptools

from benchmarks.serve.settings import BenchError

READ_BYTES = 65_536


class Connections:
    """To one server. A request takes an idle connection or opens one; there is no limit but the caller's."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = None
        if url.scheme not in ("http", "https") or not url.hostname or (port is None and ":" in url.netloc[-6:]):
            raise BenchError(f"--base-url must be http://HOST:PORT or https://HOST:PORT, got {base_url!r}", usage=True)
        self.base_url = base_url
        self._host = url.hostname
        self._port = port or (443 if url.scheme == "https" else 80)
        self._prefix = url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": url.netloc, **headers}.items())
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Raises OSError or BadAnswer. The connection is reused only if the answer was read to its end."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        response = await self._begin(head.encode("latin-1") + body)
        try:
            yield response
        finally:
            if response.complete and response.keep:
                self._idle.append(response.connection)
            else:
                response.connection.close()

    async def _begin(self, message: bytes) -> Response:
        """On a connection that was idle the server may be just hanging up: then on a new one."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await connection.ask(message)
            except OSError:
                connection.close()
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return await _Connection(reader, writer).ask(message)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class BadAnswer(Exception):
    """What came is no HTTP, or it ended too early."""


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def ask(self, message: bytes) -> Response:
        """Sends it and reads the head of the answer. ConnectionError if nothing came."""
        self._writer.write(message)
        response = Response(self)
        try:
            await self._writer.drain()
            while not response.status:
                if not await response.feed():
                    raise ConnectionResetError("the server closed the connection without an answer")
        except BaseException:
            self.close()
            raise
        return response

    def close(self) -> None:
        self._writer.close()


class Response:
    """The status, then the body in the pieces in which it arrives."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.status = 0
        self.complete = False
        self.keep = False
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []

    # httptools calls these two and no others that we need
    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep = self._parser.should_keep_alive()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    async def feed(self) -> bool:
        data = await self.connection.reader.read(READ_BYTES)
        if not data:
            return False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadAnswer(f"what answers there does not speak HTTP/1.1: {error}") from None
        return True

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            if self._body:
                data, self._body = b"".join(self._body), []
                yield data
            elif self.complete:
                return
            elif not await self.feed():
                raise BadAnswer("the connection was closed in the middle of the answer")

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])
