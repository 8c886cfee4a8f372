"""Load over OpenAI's HTTP API, on Pagewire or any other server that speaks it: completions or chat, always streamed.

Tokens are counted by the server's usage, since chunks may hold several or none. A server that ignores
`stream_options` is counted by its chunks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.serve.connection import BadAnswer, Connections, Response
from benchmarks.serve.record import Facts, Record
from benchmarks.serve.settings import BenchError, Settings

CALL_S = 30.0  # for calls that generate nothing


class HttpTarget:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chat = settings.endpoint.rstrip("/").endswith("chat/completions")
        self.backend = "openai-chat" if self._chat else "openai"
        headers = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "pagewire-bench"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._connections = Connections(settings.base_url.removesuffix("/").removesuffix("/v1"), headers)
        self._model = settings.model

    async def facts(self) -> Facts:
        answer = await self._call("GET", "/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not cards:
            raise BenchError(f"{self._settings.base_url}/v1/models names no model")
        known = {card["id"]: card for card in cards}
        self._model = self._settings.model or next(iter(known))
        if self._model not in known:
            raise BenchError(f"--model {self._model} is not served: {', '.join(known)}", usage=True)
        return Facts(self._model, known[self._model].get("max_model_len"))

    async def tokenize(self, text: str) -> list[int] | None:
        if self._chat:  # messages are text
            return None
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        answer = await self._call("POST", "/tokenize", body, may_lack=True)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(isinstance(each, int) for each in tokens) else None

    async def send(self, record: Record) -> None:
        body = json.dumps(self._body(record)).encode()
        record.sent = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self._settings.timeout),
                self._connections.request("POST", self._settings.endpoint, body) as response,
            ):
                if response.status == 200:
                    await self._read(response, record)
                else:
                    record.error = f"HTTP_{response.status}: {_sentence(await response.read())}"
        except TimeoutError:
            record.error = f"TIMEOUT: the answer was not complete after {self._settings.timeout:g} s"
        except OSError as error:
            record.error = f"CONNECTION: {error}"
        except BadAnswer as error:
            record.error = f"BAD_ANSWER: {error}"

    async def close(self) -> None:
        await self._connections.close()

    # ---- one request ----------------------------------------------------------------------------------------

    def _body(self, record: Record) -> dict[str, Any]:
        job, settings = record.job, self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": job.output_len,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if self._chat:
            body["messages"] = [{"role": "user", "content": job.prompt}]
            body["max_completion_tokens"] = body.pop("max_tokens")
        else:
            body["prompt"] = job.prompt
        return body

    async def _read(self, response: Response, record: Record) -> None:
        ended = False
        usage: dict[str, Any] = {}
        async for now, data in _events(response):
            if data == b"[DONE]":
                ended = True
                continue
            try:
                chunk = json.loads(data)
            except ValueError:
                raise BadAnswer(f"an event is not JSON: {data[:80]!r}") from None
            if error := chunk.get("error"):
                record.error = f"STREAM: {error.get('message', error) if isinstance(error, dict) else error}"
                return
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                text, counts = self._token_of(choice)
                ended = ended or bool(choice.get("finish_reason"))
                # An answer may end before its first token, or that may have no text: then its end stands for it.
                if counts or (choice.get("finish_reason") and not record.chunk_times):
                    record.add(now, len(choice.get("token_ids") or ()), text)
        if not ended or not record.chunk_times:
            record.error = "BAD_ANSWER: the stream ended without a finish reason"
        else:
            record.prompt_len = usage.get("prompt_tokens") or record.job.prompt_len
            record.output_len = usage.get("completion_tokens") or sum(max(1, each) for each in record.chunk_tokens)

    def _token_of(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """The chunk's text, and whether it holds a token: a bare role and a bare finish reason hold none."""
        if not self._chat:
            text = choice.get("text") or ""
            return text, bool(text) or not choice.get("finish_reason")
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        return text, bool(text or delta.get("tool_calls"))

    # ---- calls that generate nothing ------------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: Any = None, may_lack: bool = False) -> Any:
        """`may_lack`: None if the server has no such call."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(CALL_S), self._connections.request(method, path, data) as response:
                status, answer = response.status, await response.read()
        except (OSError, BadAnswer) as error:
            raise BenchError(f"nothing that speaks HTTP answers at {self._settings.base_url}: {error}") from None
        if status == 200:
            try:
                return json.loads(answer)
            except ValueError:
                raise BenchError(f"{self._settings.base_url}{path} answered what is not JSON") from None
        if may_lack:
            return None
        raise BenchError(f"{self._settings.base_url}{path} answered {status}: {_sentence(answer)}")


async def _events(response: Response) -> AsyncIterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which its bytes were there."""
    rest = b""
    async for piece in response.pieces():
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


def _sentence(body: bytes) -> str:
    """What an error says, in whose shape ever."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError):
        return body[:200].decode("utf-8", "replace").strip() or "an empty body"
