"""The page's routes. Its files are read once and open to all; its state needs the key, as all that tells does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from router.dispatch import Dispatcher
from router.front import Front
from router.page.state import snapshot
from router.status import RequestError
from router.workers import Role
from wire.version import VERSION

ASSETS = {"/": ("index.html", "text/html"), "/page/style.css": ("style.css", "text/css"),
          "/page/app.js": ("app.js", "text/javascript")}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(
    app: FastAPI,
    front: Front,
    dispatcher: Dispatcher,
    ready: Callable[[], bool],
    absent: Callable[[], Mapping[tuple[Role, str], str]],
) -> None:
    for path, (name, kind) in ASSETS.items():
        content = files("router.page").joinpath(name).read_bytes()
        app.add_api_route(path, partial(_asset, content, kind), methods=["GET"], include_in_schema=False)

    async def state() -> Response:
        try:
            model = front.model().names[0]
        except RequestError:  # it is being prepared
            model = ""
        about = {"version": VERSION, "ready": ready(), "model": model}
        now = snapshot(dispatcher, absent(), time.monotonic())
        return JSONResponse(about | now, headers={"Cache-Control": "no-store"})

    app.add_api_route("/page/state", state, methods=["GET"], include_in_schema=False)


async def _asset(content: bytes, kind: str) -> Response:
    return Response(content, media_type=kind, headers=HEADERS)
