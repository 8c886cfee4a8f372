"""Listens for HTTP on a socket that is open already, on the loop of whoever runs it. Knows no route.

uvicorn without its signal handlers: the process has its own. With certificates it speaks mTLS, as gRPC does there.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from wire.security import Security

FLUSH_S = 2  # how long answers may take to send their last bytes
KEEP_ALIVE_S = 60  # longer than clients keep an idle connection, so that none is closed under a new request


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, listening: socket.socket, security: Security) -> None:
    """Until cancelled; answers that are being sent then have FLUSH_S."""
    config = uvicorn.Config(
        app,
        http="httptools",
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
