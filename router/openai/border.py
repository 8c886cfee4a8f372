"""What every HTTP call passes before its route sees it: the key, the size of its body, and what nobody foresaw.

Pure ASGI. /health and /ping are open, as probes need them, and so are the page's files, which tell nothing; everything
else needs the key where there is one.
"""

from __future__ import annotations

import hmac
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.border import internal_error
from router.openai.errors import error_response
from router.page.routes import ASSETS
from router.status import RequestError
from wire.logs import about

OPEN_PATHS = frozenset({"/health", "/ping", *ASSETS})
REQUEST_ID = b"x-request-id"  # the client's own name for it, or a new one: comes back, and is in each log line
MAX_ECHO = 256  # bytes of a name that is too long for a request, in the refusal that says so
MAX_BODY_BYTES = 8 * 2**20  # a prompt of a million token ids fits


class Border:
    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key.encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False
        headers = dict(scope["headers"])
        request_id = headers.get(REQUEST_ID) or uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")
        about(request_id.decode("latin-1"))

        async def noting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id[:MAX_ECHO])]
            await send(message)

        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            await self._app(scope, _limited(receive, headers.get(b"content-length", b"")), noting)
        except RequestError as error:
            await error_response(error)(scope, receive, noting)
        except Exception:
            if started:  # the server logs it and closes the connection in the middle of the answer
                raise
            await error_response(internal_error(scope["path"]))(scope, receive, noting)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, given = authorization.partition(b" ")
        if not hmac.compare_digest(given.strip(), self._key) or scheme.lower() != b"bearer":
            raise RequestError(
                "UNAUTHENTICATED", "a valid key is required: send it as Authorization: Bearer KEY",
                reason="INVALID_API_KEY",
            )  # fmt: skip


def _limited(receive: Receive, length: bytes) -> Receive:
    """Ends a body that is too large where it becomes so, or before its first byte if it says so itself."""
    announced = int(length) if length.isdigit() and len(length) < 20 else 0
    size = 0

    async def limited() -> Message:
        nonlocal size
        if announced > MAX_BODY_BYTES:
            raise _too_large(announced)
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise _too_large(size)
        return message

    return limited


def _too_large(size: int) -> HTTPException:
    return HTTPException(413, f"the body must have at most {MAX_BODY_BYTES} bytes, got {size} or more")
