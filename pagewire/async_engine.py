"""AsyncLLMEngine: one engine in this process for many tasks, each of which reads its own stream of outputs.

    engine = AsyncLLMEngine.from_engine_args(EngineArgs("smollm2"))
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32), "request-1"):
        print(output.outputs[0].text)

An output holds all that there is so far. A reader that is slower than the engine gets the newest one, so nothing
piles up; a reader that leaves frees its request's KV blocks within one step.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncGenerator
from contextlib import suppress

from engine.types import SamplingParams
from pagewire.answers import PagewireError
from pagewire.engine_args import EngineArgs
from pagewire.engine_thread import EngineThread, Job
from pagewire.llm import start
from pagewire.outputs import RequestOutput
from pagewire.prompts import PromptLike, check_params, read_prompt


class AsyncLLMEngine:
    """Made by from_engine_args; shut it down to give its memory back."""

    def __init__(self, thread: EngineThread, seed: int) -> None:
        self._thread = thread
        self._close = weakref.finalize(self, thread.close)
        self._rng = random.Random(seed)
        self._streams: dict[str, _Stream] = {}

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLMEngine:
        """Blocks until the model is loaded."""
        return cls(start(args), args.seed)

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """The last output is `finished`. Raises PagewireError."""
        if request_id in self._streams:
            raise PagewireError("ALREADY_EXISTS", f"the request {request_id!r} is running already", "request_id")
        stream = self._streams[request_id] = _Stream()
        try:
            job = await self._job(prompt, sampling_params, request_id, stream)
            self._thread.submit(job)
            stream.job = job
            if stream.aborted:
                self._thread.abort(job)
            while True:
                output = await stream.newest()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            if stream.job is not None:
                self._thread.abort(stream.job)

    async def abort(self, request_id: str) -> None:
        """Its stream ends with what there is and the reason abort. An id that is not running is nothing to do."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.aborted = True
            if stream.job is not None:
                self._thread.abort(stream.job)

    def shutdown(self) -> None:
        """Streams that are open end with an error."""
        self._close()

    async def _job(self, prompt: PromptLike, params: SamplingParams | None, request_id: str, stream: _Stream) -> Job:
        text = self._thread.text
        read = await asyncio.to_thread(read_prompt, prompt, text)
        params = check_params(params or SamplingParams(**text.defaults), text)  # type: ignore[arg-type]
        seed = self._rng.getrandbits(64) if params.seed is None else params.seed
        return Job(request_id, read, params, seed, text.tokenizer, stream.put, stream=True)


class _Stream:
    """The newest output of one request, from the engine's thread to its reader's loop."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.aborted = False
        self._loop = asyncio.get_running_loop()
        self._newest: RequestOutput | PagewireError | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput | PagewireError) -> None:
        with suppress(RuntimeError):  # the loop is closed, and its reader gone
            self._loop.call_soon_threadsafe(self._set, output)

    async def newest(self) -> RequestOutput:
        await self._changed.wait()
        self._changed.clear()
        output = self._newest
        assert output is not None, "something was put"
        if isinstance(output, PagewireError):
            raise output
        return output

    def _set(self, output: RequestOutput | PagewireError) -> None:
        self._newest = output
        self._changed.set()
