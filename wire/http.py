"""HTTP on a socket that is open already, on the loop of whoever runs it; and the small door of a worker.

uvicorn without its signal handlers: the process has its own. With certificates it speaks mTLS, as gRPC does there.
A worker's door has /metrics, which needs the deployment's token where there is one, and /health and /ping, which
probes may ask without. It knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from wire.security import Security

FLUSH_S = 2  # how long answers may take to send their last bytes
KEEP_ALIVE_S = 60  # longer than clients keep an idle connection, so that none is closed under a new request
ABORT = "pagewire.abort"  # in a scope's extensions: ends the connection, whatever its peer has not read
MAX_HEAD_BYTES = 64 * 2**10  # a request's first line and headers, from the second time that some of them came
OPEN_PATHS = frozenset({"/health", "/ping"})


class _Connection(HttpToolsProtocol):
    """uvicorn's would keep a head of any size, from whoever can connect, and what its peer never reads, for ever."""

    _head: int | None = None  # bytes of the head that is being read

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        begun = self._head is not None
        super().data_received(data)
        if begun and self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self.send_400_response(f"The headers must have at most {MAX_HEAD_BYTES} bytes.")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: Any, listening: socket.socket, security: Security) -> None:
    """An ASGI app, until cancelled; answers that are being sent then have FLUSH_S."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
        ssl_certfile=security.cert,
        ssl_keyfile=security.key,
        ssl_ca_certs=security.ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve([listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * FLUSH_S)
        serving.cancel()


class WorkerDoor:
    """An ASGI app. `ready` says whether the worker takes requests."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool], token: str | None) -> None:
        self._registry = registry
        self._ready = ready
        self._token = token.encode() if token else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, kind, body = self._answer(scope)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Any) -> tuple[int, str, bytes]:
        path, plain = scope["path"], "text/plain; charset=utf-8"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, plain, b"only GET is allowed here\n"
        if path in OPEN_PATHS:
            return (200, plain, b"") if self._ready() else (503, plain, b"not ready: loading, draining or stuck\n")
        if path != "/metrics":
            return 404, plain, b"a worker has /metrics and /health here; requests go to the router\n"
        if not self._allowed(dict(scope["headers"]).get(b"authorization", b"")):
            return 401, plain, b"the deployment's token is required: send it as Authorization: Bearer TOKEN\n"
        return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def _allowed(self, authorization: bytes) -> bool:
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(b" ")
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"
