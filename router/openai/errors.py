"""Refusals in OpenAI's shape: {"error": {message, type, param, code}} with the status that its clients expect.

RequestError is the one kind of refusal that the router has; what FastAPI finds wrong with a body becomes one too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from router.openai.asked import in_our_names
from router.status import RequestError

# gRPC status: HTTP status and the type of error.
_STATUS: Mapping[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (422, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNAVAILABLE": (503, "service_unavailable"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
    "UNIMPLEMENTED": (501, "not_implemented"),
}
_INTERNAL = (500, "server_error")

# Reasons that clients know under another name.
_CODES = {"TOOLONG": "context_length_exceeded"}
MAX_SENTENCE = 2000  # characters


def encoded(value: Any) -> bytes:
    """Compact JSON. Half a surrogate pair, which a client can spell and no text can hold, becomes "?"."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def error_body(error: RequestError) -> dict[str, Any]:
    error = in_our_names(error)
    code = "model_not_found" if error.field == "model" and error.code == "NOT_FOUND" else error.reason.lower()
    return {
        "error": {
            "message": str(error)[:MAX_SENTENCE],
            "type": _STATUS.get(error.code, _INTERNAL)[1],
            "param": error.field or None,
            "code": _CODES.get(error.reason, code),
        }
    }


def error_response(error: RequestError, status: int | None = None) -> Response:
    headers = {"Retry-After": str(math.ceil(error.retry_after))} if error.retry_after else {}
    if error.code == "UNAUTHENTICATED":
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        encoded(error_body(error)),
        status or _STATUS.get(error.code, _INTERNAL)[0],
        headers,
        media_type="application/json",
    )


def bad_body(problems: Sequence[Mapping[str, Any]]) -> RequestError:
    """What a body's types say is wrong with it; the first field is named, with everything that it may be."""
    first = problems[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "")
        return RequestError(
            "INVALID_ARGUMENT", f"the body is not valid JSON: {why} at character {place[0]}", reason="BAD_JSON"
        )
    if not place:
        return RequestError(
            "INVALID_ARGUMENT", "the body must be a JSON object, sent as Content-Type: application/json"
        )
    field = place[0]
    same = [each for each in problems if len(each["loc"]) > 1 and str(each["loc"][1]) == field]
    words = " or: ".join(dict.fromkeys(str(each["msg"]) for each in same))
    return RequestError("INVALID_ARGUMENT", f"{field}: {words}", field=field, reason="BAD_TYPE")
