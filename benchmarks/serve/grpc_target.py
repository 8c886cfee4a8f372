"""Load over Pagewire's gRPC API, through the client that users have. One channel, a stream for each request."""

from __future__ import annotations

import time

from benchmarks.serve.record import Facts, Record
from benchmarks.serve.settings import BenchError, Settings
from engine.types import SamplingParams
from pagewire.answers import PagewireError
from pagewire.client import AsyncClient


class GrpcTarget:
    backend = "pagewire-grpc"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = AsyncClient(settings.address, settings.security)

    async def facts(self) -> Facts:
        try:
            models = await self._client.models(timeout=10)
        except PagewireError as error:
            raise BenchError(str(error)) from None
        if not models:
            raise BenchError(f"the router at {self._settings.address} serves no model yet")
        wanted = self._settings.model or models[0].id
        known = {model.id: model for model in models}
        if wanted not in known:
            raise BenchError(f"--model {wanted} is not served: {', '.join(known)}", usage=True)
        return Facts(wanted, known[wanted].max_model_len or None)

    async def tokenize(self, text: str) -> list[int]:
        try:
            return await self._client.tokenize(text, add_special_tokens=False, timeout=60)
        except PagewireError as error:
            raise BenchError(str(error)) from None

    async def send(self, record: Record) -> None:
        job, settings = record.job, self._settings
        params = SamplingParams(
            temperature=settings.temperature, max_tokens=job.output_len, ignore_eos=settings.ignore_eos
        )
        record.sent = time.perf_counter()
        stream = self._client.stream(job.prompt, params, model=settings.model, timeout=settings.timeout)
        try:
            async with stream:
                async for delta in stream:
                    # An answer may end before its first token: then its end stands for it.
                    if delta.token_ids or (delta.finish_reason and not record.chunk_times):
                        record.add(time.perf_counter(), len(delta.token_ids), delta.text)
        except PagewireError as error:
            record.error = f"{error.code}: {error}"
            return
        record.prompt_len = stream.usage.prompt_tokens
        record.output_len = stream.usage.completion_tokens
        if not record.chunk_times:
            record.error = "BAD_ANSWER: the stream ended without a token or a finish reason"

    async def close(self) -> None:
        await self._client.close()
