"""READ FIRST: a request's life in the router, from the client's call to its last word.

1. `Generate` or `GenerateStream` arrives. validate.py checks every field; a bad one ends the call here, by name.
   (The HTTP door, openai/, makes the same plain request of its JSON, and goes the same way from here on.)
2. front.py: the prompt becomes token ids in the text executor (text/model.py), off the event loop. Its deadline is
   the client's, or this router's default, never more than its maximum.
3. Each of the n choices is one request to the Dispatcher (dispatch.py, sans-IO), by way of the Driver (driver.py).
   The Dispatcher refuses it with numbers, or queues it, or places it: PrefillStart to the least loaded prefill
   worker, and once that has accepted, DecodeStart with its ticket to a decode worker. flow.py has the states.
4. Workers speak on their sessions (sessions.py). Every token comes through the Dispatcher, which keeps the log and
   moves the request to other workers when one dies; the call never notices.
5. The tokens land in the Call's queue, where they wait for a moment for those behind them while many streams are open.
   generation.py hands them to each choice's answer.py, which turns them into text, finds stop strings and drops what
   follows.
6. The client gets Started, then deltas, then Finished; `consumed` gives back credit as it reads, so a slow reader
   slows its own request and fills no memory.
7. Whatever ends the call (its last token, an error, the deadline, a client that left), `close` cancels what still
   runs at the workers, in the same turn of the loop.

Errors are raised as RequestError wherever they are found; border.py gives them their status and details.
"""

from __future__ import annotations

import time
from collections import defaultdict

import grpc.aio

from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc
from router import border
from router.answer import Piece
from router.front import Front
from router.generation import AT_ONCE, Generation, joined
from router.patience import Patience, TooSlow
from router.status import RequestError
from router.validate import check_chunking, check_detokenize, check_generate, check_tokenize
from router.workers import Role, Worker
from wire.channel import write
from wire.codec import logprob_to_pb, to_duration
from wire.pairing import paths_to_pb
from wire.version import VERSION


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, front: Front) -> None:
        self._front = front
        self._started_at = time.monotonic()

    # ---- generating -----------------------------------------------------------------------------------------

    async def Generate(self, request: gpb.GenerateRequest, context: grpc.aio.ServicerContext) -> gpb.GenerateResponse:
        generation = await self._begin(request, context)
        pieces: dict[int, list[Piece]] = defaultdict(list)
        try:
            while not generation.over:
                for index, piece in await generation.pieces(AT_ONCE):
                    pieces[index].append(piece)
                    generation.consumed(index)
            return gpb.GenerateResponse(
                request_id=generation.request_id,
                model=generation.model.names[0],
                choices=[generation.choice(index, joined(parts)) for index, parts in sorted(pieces.items())],
                prompt_logprobs=map(logprob_to_pb, generation.prompt_logprobs),
                usage=generation.usage(),
                timing=generation.timing(),
            )
        finally:
            generation.close()

    async def GenerateStream(self, request: gpb.GenerateStreamRequest, context: grpc.aio.ServicerContext) -> None:
        with self._front.refusals():
            chunking = check_chunking(request)
        generation = await self._begin(request.request, context)
        started = False
        try:
            async with Patience() as patience:
                while not generation.over:
                    pieces = await generation.pieces(chunking if started else AT_ONCE)
                    if generation.begun and not started:
                        started = True
                        await patience.during(write(context, generation.event(started=generation.started())))
                    for index, piece in pieces:
                        if generation.shows(piece):
                            delta = generation.choice(index, piece)
                            await patience.during(write(context, generation.event(delta=delta)))
                        generation.consumed(index)
                finished = gpb.GenerateStreamResponse.Finished(usage=generation.usage(), timing=generation.timing())
                await patience.during(write(context, generation.event(finished=finished)))
        except TooSlow as error:
            raise RequestError("RESOURCE_EXHAUSTED", f"slow consumer: {error}") from error
        finally:
            generation.close()

    def unreadable(self) -> None:
        """For the border: a request to generate whose bytes are none."""
        self._front.unreadable()

    async def _begin(self, request: gpb.GenerateRequest, context: grpc.aio.ServicerContext) -> Generation:
        """Whoever gets the generation closes it."""
        with self._front.refusals():
            model = self._front.model()
            checked = check_generate(request, model)
        return await self._front.begin(checked, model, context.time_remaining(), border.incoming(context))

    # ---- text -----------------------------------------------------------------------------------------------

    async def Tokenize(self, request: gpb.TokenizeRequest, context: grpc.aio.ServicerContext) -> gpb.TokenizeResponse:
        model = self._front.model()
        prompt = await self._front.encode(check_tokenize(request, model), model, request.add_special_tokens)
        return gpb.TokenizeResponse(token_ids=prompt.token_ids, max_model_len=self._front.max_model_len(model))

    async def Detokenize(
        self, request: gpb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> gpb.DetokenizeResponse:
        model = self._front.model()
        return gpb.DetokenizeResponse(text=await model.decode(check_detokenize(request, model)))

    # ---- about this server ----------------------------------------------------------------------------------

    async def ListModels(
        self, request: gpb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> gpb.ListModelsResponse:
        model = self._front.model()
        length = self._front.max_model_len(model)
        cards = [gpb.Model(id=name, root=model.names[0], max_model_len=length) for name in model.names]
        return gpb.ListModelsResponse(models=cards)

    async def GetServerInfo(
        self, request: gpb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> gpb.GetServerInfoResponse:
        workers = self._front.workers
        return gpb.GetServerInfoResponse(
            version=VERSION,
            uptime=to_duration(time.monotonic() - self._started_at),
            prefill_workers=len(workers.eligible(Role.PREFILL)),
            decode_workers=len(workers.eligible(Role.DECODE)),
            workers=map(_worker_status, workers.all()),
        )


def _worker_status(worker: Worker) -> gpb.WorkerStatus:
    hello, load = worker.hello, worker.load
    return gpb.WorkerStatus(
        role=worker.role.value,
        address=worker.address,
        accepting=worker.eligible,
        reason=worker.why_not,
        dtype=hello.layout.dtype,
        block_size=hello.layout.block_size,
        block_bytes=hello.layout.block_bytes,
        total_blocks=hello.total_blocks,
        free_blocks=load.free_blocks,
        leased_blocks=load.leased_blocks,
        running=load.running,
        waiting=load.waiting,
        transports=[offer.kind for offer in hello.transports],
        pulled_blocks=load.pulled_blocks,
        kv_path=load.kv_path,
        kv_paths=paths_to_pb(load.kv_paths),
    )
