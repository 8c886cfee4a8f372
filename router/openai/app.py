"""The routes of the HTTP door. Each reads its body's types, has it checked, and answers in OpenAI's words.

Every rule is validate.py's and every generation goes through front.py, as on gRPC. Holds no state of a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.types import InvalidField
from router.front import Front
from router.openai.asked import chat_asked, completion_asked, tokenize_asked, tokens_asked
from router.openai.border import Border
from router.openai.errors import bad_body, encoded, error_response
from router.openai.reply import Reply, Stream
from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody, Refusal, Sampled, TokenizeBody
from router.openai.shapes import ChatShape, CompletionShape
from router.status import RequestError
from router.text.model import TextModel
from router.validate import check_model, invalid
from wire.tracing import Incoming
from wire.version import VERSION

JSON, EVENTS = "application/json", "text/event-stream"
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
UNREAD_STATUS = frozenset({400, 413})


def build_app(front: Front, ready: Callable[[], bool], registry: CollectorRegistry, key: str | None) -> FastAPI:
    """`key` is what clients must show; None asks for nothing."""
    app = FastAPI(title="Pagewire", version=VERSION, docs_url=None, redoc_url=None)
    app.add_middleware(Border, key=key)
    routes = Routes(front, ready, registry)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(InvalidField, _invalid)
    app.add_exception_handler(RequestValidationError, routes.bad_body)
    app.add_exception_handler(HTTPException, routes.http_error)
    for method, path, route, *content in (
        ("POST", "/v1/chat/completions", routes.chat, JSON, EVENTS),
        ("POST", "/v1/completions", routes.completions, JSON, EVENTS),
        ("POST", "/tokenize", routes.tokenize, JSON),
        ("POST", "/v1/tokenize", routes.tokenize, JSON),
        ("POST", "/detokenize", routes.detokenize, JSON),
        ("POST", "/v1/detokenize", routes.detokenize, JSON),
        ("GET", "/v1/models", routes.models, JSON),
        ("GET", "/v1/models/{name:path}", routes.model, JSON),
        ("GET", "/health", routes.health),
        ("GET", "/ping", routes.health),
        ("GET", "/version", routes.version, JSON),
        ("GET", "/metrics", routes.metrics, "text/plain"),
    ):
        app.add_api_route(path, route, methods=[method], **_documented(content))
        if method == "GET":  # probes ask so; the server sends no body then
            app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)
    return app


def _documented(content: Sequence[str]) -> dict[str, Any]:
    """What /openapi.json says of a route's answers: the kinds of content, and that every refusal has one body."""
    refused: dict[str, Any] = {"model": Refusal, "description": "Refused; the body says why."}
    answered = {"description": "The answer.", "content": {kind: {} for kind in content}}
    return {
        "response_model": None,
        "response_class": Response,
        "responses": {200: answered, "4XX": refused, "5XX": refused},
    }


class Routes:
    def __init__(self, front: Front, ready: Callable[[], bool], registry: CollectorRegistry) -> None:
        self._front = front
        self._ready = ready
        self._registry = registry
        self._started_at = int(time.time())

    # ---- generating -----------------------------------------------------------------------------------------

    async def chat(self, body: ChatBody, request: Request) -> Response:
        request_id = _request_id(request)
        with self._front.refusals():
            model = self._front.model()
            asked = chat_asked(body, request_id, model)
        length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        shape = ChatShape(model.tokenizer, bool(body.logprobs), bool(body.return_token_ids), length)
        if body.stream:
            return Stream(self._front, model, [asked], shape, request_id, _incoming(request), **_usage_of(body))
        return Reply(self._front, model, [asked], shape, request_id, _incoming(request))

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        request_id = _request_id(request)
        with self._front.refusals():
            model = self._front.model()
            asked = completion_asked(body, request_id, model)
        shape = CompletionShape(
            model.tokenizer,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            echo=bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        if body.stream:
            return Stream(self._front, model, asked, shape, request_id, _incoming(request), **_usage_of(body))
        return Reply(self._front, model, asked, shape, request_id, _incoming(request))

    async def bad_body(self, request: Request, error: Exception) -> Response:
        """What the types of a body refuse."""
        assert isinstance(error, RequestValidationError), "it is registered for these"
        if request.url.path in GENERATING:
            self._front.unreadable()
        return error_response(bad_body(error.errors()))

    async def http_error(self, request: Request, error: Exception) -> Response:
        """What the framework refuses: an unknown path, a wrong method, a body that is too large or cannot be read."""
        assert isinstance(error, HTTPException), "it is registered for these"
        if request.url.path in GENERATING and error.status_code in UNREAD_STATUS:
            self._front.unreadable()
        return _http_error(request, error)

    # ---- text -----------------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeBody) -> Response:
        model = self._front.model()
        prompt = await self._front.encode(tokenize_asked(body, model), model, body.add_special_tokens is not False)
        tokens = list(prompt.token_ids)
        return _json({"count": len(tokens), "max_model_len": self._front.max_model_len(model), "tokens": tokens})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        model = self._front.model()
        return _json({"prompt": await model.decode(tokens_asked(body.model, body.tokens, model))})

    # ---- about this server ----------------------------------------------------------------------------------

    async def models(self) -> Response:
        model = self._front.model()
        return _json({"object": "list", "data": [self._card(name, model) for name in model.names]})

    async def model(self, name: str) -> Response:
        if not name:  # /v1/models/
            return await self.models()
        model = self._front.model()
        check_model(name, model)
        return _json(self._card(name, model))

    async def health(self) -> Response:
        if not self._ready():
            raise RequestError("UNAVAILABLE", "the router is not ready: see its log or `pagewire ps`", retry_after=1.0)
        return Response()

    async def version(self) -> Response:
        return _json({"version": VERSION})

    async def metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _card(self, name: str, model: TextModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "pagewire",
            "root": model.names[0],
            "parent": None,
            "max_model_len": self._front.max_model_len(model),
        }


def _request_id(request: Request) -> str:
    """The client's own, or the one that the border gave it. Never a key."""
    return str(request.state.request_id)


def _incoming(request: Request) -> Incoming:
    """The trace that the caller's span belongs to."""
    return Incoming.of(request.headers.get("traceparent"), request.headers.get("tracestate"))


def _usage_of(body: Sampled) -> dict[str, bool]:
    options = body.stream_options
    include = bool(options and options.include_usage)
    return {"include_usage": include, "usage_always": bool(include and options and options.continuous_usage_stats)}


def _json(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


# ---- refusals -------------------------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "it is registered for these"
    return error_response(error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidField), "it is registered for these"
    return error_response(invalid(error))


def _http_error(request: Request, error: HTTPException) -> Response:
    place = f"{request.method} {request.url.path[:200]}"
    sentence = {
        400: "the body is not JSON that can be read: it nests too deep, or has a number that is too long",
        404: f"there is no {place} here",
        405: f"{place} is not allowed",
    }.get(error.status_code, error.detail)
    code = "NOT_FOUND" if error.status_code == 404 else "INVALID_ARGUMENT"
    reason = {413: "BODY_TOO_LARGE", 400: "BAD_JSON"}.get(error.status_code, "")
    response = error_response(RequestError(code, sentence, reason=reason), error.status_code)
    response.headers.update(error.headers or {})
    return response
