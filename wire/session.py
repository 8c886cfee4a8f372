"""Both halves of an Attach stream: one session of one router at one worker.

Owns the stream, its heartbeats and the verdict that the other side is dead. It never interprets a command or an
event: it hands them to the callbacks in order and sends what is put into its Outbound, in order. A session that
ends for whatever reason reports so exactly once; there is no resumption, the router opens a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from engine.messages import Heartbeat, RouterHello, WorkerHello, WorkerLoad
from wire.codec import UNREADABLE, InvalidMessage, readable
from wire.liveness import HEARTBEAT_S, TICK_S, Liveness
from wire.logs import get_logger
from wire.tasks import cancel_all

log = get_logger("session")

HELLO_TIMEOUT_S = 3.0
_UNREAD = "Internal error from Core"  # gRPC's words, as INTERNAL, when our write meets a stream that was refused first
MAX_QUEUED = 10_000  # messages; a peer that reads this far behind is as good as dead

Sent = TypeVar("Sent")


class SessionOver(Exception):
    """The session ended; str() says why, in one sentence."""


class Outbound(Generic[Sent]):
    """What waits to be sent on a session, in order. Bounded: overflowing closes it, which ends the session."""

    def __init__(self, limit: int = MAX_QUEUED) -> None:
        self._waiting: deque[Sent] = deque()
        self._limit = limit
        self._wake = asyncio.Event()
        self.closed = False

    def put(self, message: Sent) -> None:
        if self.closed:
            return  # the session is ending: its end says all that this message could have said
        if len(self._waiting) >= self._limit:
            self.close()
            return
        self._waiting.append(message)
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def drain(self) -> AsyncIterator[Sent]:
        """Yields until closed. What is still queued at the close is sent first."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self.closed:
                return
            self._wake.clear()
            await self._wake.wait()


class Worker(Protocol):
    """What a worker does with its sessions. The numbers are the router's session numbers."""

    def session_opened(self, hello: RouterHello, outbound: Outbound[Any]) -> None: ...
    def session_command(self, session: int, command: Any) -> None: ...
    def session_closed(self, session: int, outbound: Outbound[Any]) -> None:
        """`outbound` tells apart two streams that claim the same number: only the registered one counts."""

    def load(self) -> WorkerLoad: ...


async def serve(
    requests: AsyncIterator[Any],
    context: grpc.aio.ServicerContext,
    hello: WorkerHello,
    worker: Worker,
    from_pb: Callable[[Any], Any],
    to_pb: Callable[[Any], Any],
) -> AsyncGenerator[Any, None]:
    """The worker's half: the body of an Attach handler. Yields what to send; its load goes out every second."""
    router = await _read_hello(requests, context, from_pb)
    outbound: Outbound[Any] = Outbound()
    handler = asyncio.current_task()
    assert handler is not None, "an Attach handler runs in a task"
    liveness = Liveness(time.monotonic())
    complaint = ""

    async def read() -> None:
        nonlocal complaint
        try:
            async for message in requests:
                liveness.heard(time.monotonic())
                command = from_pb(message)
                if isinstance(command, RouterHello):
                    raise InvalidMessage("a second hello")
                if not isinstance(command, Heartbeat):
                    worker.session_command(router.session, command)
        except UNREADABLE as error:
            complaint = str(error)
            log.warning("session_invalid_message", router=router.router, error=complaint)
        finally:
            outbound.close()

    async def beat() -> None:
        sent_at = 0.0
        while liveness.alive(now := time.monotonic()):
            if now - sent_at >= HEARTBEAT_S:
                outbound.put(worker.load())
                sent_at = now
            await asyncio.sleep(TICK_S)
        log.warning("session_silent", router=router.router, session=router.session)
        handler.cancel()  # a write to a stopped peer never returns: only cancellation ends it

    worker.session_opened(router, outbound)
    tasks = [asyncio.create_task(read()), asyncio.create_task(beat())]
    try:
        yield to_pb(hello)
        async for event in outbound.drain():
            yield to_pb(event)
        if complaint:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the router sent nonsense: {complaint}")
    finally:
        outbound.close()
        worker.session_closed(router.session, outbound)
        await cancel_all(tasks)


async def _read_hello(
    requests: AsyncIterator[Any], context: grpc.aio.ServicerContext, from_pb: Callable[[Any], Any]
) -> RouterHello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = from_pb(await anext(requests))
    except (TimeoutError, StopAsyncIteration, *UNREADABLE):
        first = None
    if not isinstance(first, RouterHello):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with the router's hello")
    return first


async def attach(
    call_of: Callable[[AsyncIterator[Any]], Any],
    hello: RouterHello,
    outbound: Outbound[Any],
    on_hello: Callable[[WorkerHello], None],
    on_event: Callable[[Any], None],
    from_pb: Callable[[Any], Any],
    to_pb: Callable[[Any], Any],
) -> None:
    """The router's half: runs one session until it ends, then raises SessionOver.

    `call_of` opens the stream, such as `lambda requests: stub.Attach(requests)`. `on_hello` comes first and once,
    then `on_event` for every event in order; both run on the loop. Cancelling the caller cancels the call.
    """
    liveness = Liveness(time.monotonic())

    async def requests() -> AsyncIterator[Any]:
        yield to_pb(hello)
        async for command in outbound.drain():
            yield to_pb(command)

    async def beat() -> None:
        sequence, sent_at = 0, time.monotonic()
        while liveness.alive(now := time.monotonic()):
            if now - sent_at >= HEARTBEAT_S:
                sequence, sent_at = sequence + 1, now
                outbound.put(Heartbeat(sequence))
            if outbound.closed:
                break
            await asyncio.sleep(TICK_S)
        call.cancel()

    call = call_of(requests())
    beating = asyncio.create_task(beat())
    try:
        greeted = False
        async for message in call:
            liveness.heard(time.monotonic())
            event = from_pb(readable(message))
            if greeted:
                on_event(event)
            elif isinstance(event, WorkerHello):
                greeted = True
                on_hello(event)
            else:
                raise SessionOver("the worker did not begin with its hello")
        raise SessionOver("the worker ended the session")
    except InvalidMessage as error:
        raise SessionOver(f"the worker sent a message that does not parse: {error}") from error
    except grpc.aio.AioRpcError as error:
        raise SessionOver(_why(error)) from error
    except asyncio.CancelledError:
        # Ours if the liveness verdict cancelled the call, the caller's if its own task is being cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise SessionOver("the worker was silent for 3 s") from None
    finally:
        outbound.close()
        call.cancel()
        await cancel_all([beating])


def _why(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.CANCELLED:
        return "the session was cut off"
    if error.details() == _UNREAD:
        return "the worker refused the session before its reason could be read"
    if "Connection refused" in (error.details() or ""):  # at the end of three of gRPC's own sentences
        return "nothing listens there"
    return f"{error.code().name}: {error.details()}"
