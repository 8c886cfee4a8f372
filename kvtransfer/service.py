"""Pull streams over grpc.aio: the owner's servicer, and the puller's client.

Both carry messages between a stream and a sans-IO core, and bytes between a stream and the cache; neither
decides anything. Each stream heartbeats when it is quiet and ends after 3 s of silence, whatever the transport
below believes. Every stream ends in exactly one pull_closed or pull_stream_closed, after its last read or write.
All of it runs on the loop, so a core's word on who may read or write holds until the next await.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio

from engine.messages import BlockHandle, Heartbeat, PullDone, PullEvent, PullOpen, PullRequest
from kvtransfer.actions import Action, ClosePull, CloseStream, CopyBlock, OpenPull, SendBlock, ToOwner, ToPuller
from kvtransfer.transports.grpc_bytes import Cache, CorruptBlock, Destinations, Receiver, chunks
from kvtransfer.transports.memfd import Copy, NoPool, Pool, Pools
from protos import worker_pb2_grpc
from wire.channel import write
from wire.codec import (
    UNREADABLE,
    InvalidMessage,
    pull_event_from_pb,
    pull_event_to_pb,
    pull_request_from_pb,
    pull_request_to_pb,
    readable,
)
from wire.liveness import HEARTBEAT_S, SILENCE_S, TICK_S, Liveness
from wire.logs import get_logger
from wire.session import Outbound
from wire.tasks import cancel_all

log = get_logger("kvtransfer")

FLUSH_S = SILENCE_S  # how long a stream that we closed may take to send what was queued before
SLICE_BYTES = 16 << 20  # of one trip to the copying thread: what a pull that is over waits for
MAX_CHANNELS = 64  # to different owners; idle ones beyond are closed

Apply = Callable[[list[Action]], None]


class PullOwner(Protocol):
    """The prefiller."""

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]: ...
    def sent(self, pull: int, position: int, now: float) -> list[Action]: ...
    def pull_closed(self, pull: int, now: float) -> list[Action]: ...


class Puller(Destinations, Protocol):
    """The decoder."""

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]: ...
    def copied(self, pull: int, position: int, digest: int, now: float) -> list[Action]: ...
    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]: ...
    def pull_stream_closed(self, pull: int, now: float) -> list[Action]: ...
    def fall_back(self, pull: int, reason: str) -> None: ...


class _Watch:
    """Heartbeats of one quiet stream, and the verdict that it is over: a silent peer, or an end that does not get out.

    `end` has to cancel: a write to a stopped peer never returns.
    """

    def __init__(self, outbound: Outbound[Any], beat: Callable[[int], object], end: Callable[[], object]) -> None:
        self._outbound = outbound
        self._beat = beat
        self._end = end
        self._liveness = Liveness(time.monotonic())
        self._sent_at = time.monotonic()
        self._writing = False
        self.silent = False

    def heard(self) -> None:
        self._liveness.heard(time.monotonic())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around a write. While one is stuck, heartbeats do not queue up behind it."""
        self._writing = True
        yield
        self._writing = False
        self._sent_at = time.monotonic()

    async def run(self) -> None:
        sequence, closed_at = 0, None
        while True:
            now = time.monotonic()
            if not self._liveness.alive(now):
                self.silent = True
                break
            if self._outbound.closed:
                closed_at = closed_at or now
                if now - closed_at > FLUSH_S:
                    break
            elif now - self._sent_at >= HEARTBEAT_S and not self._writing:
                sequence, self._sent_at = sequence + 1, now
                self._outbound.put(self._beat(sequence))
            await asyncio.sleep(TICK_S)
        self._end()


# ---- the owner of blocks --------------------------------------------------------------------------------------


class KvTransferService(worker_pb2_grpc.KvTransferServiceServicer):
    """Serves Pull. `apply` carries out the core's actions, those of this class through `carry`."""

    def __init__(self, core: PullOwner, cache: Cache, apply: Apply) -> None:
        self._core = core
        self._cache = cache
        self._apply = apply
        self._streams: dict[int, Outbound[ToPuller | SendBlock]] = {}
        self._last_pull = 0
        self.bytes_sent = 0

    def __len__(self) -> int:
        return len(self._streams)

    def carry(self, action: ToPuller | SendBlock | ClosePull) -> None:
        outbound = self._streams.get(action.pull)
        if outbound is None:
            return  # the stream ended meanwhile, and the core knows or is about to
        if isinstance(action, ClosePull):
            outbound.close()
        else:
            outbound.put(action)

    async def Pull(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        self._last_pull += 1
        pull = self._last_pull
        outbound = self._streams[pull] = Outbound()
        handler = asyncio.current_task()
        assert handler is not None, "a Pull handler runs in a task"
        watch = _Watch(outbound, lambda sequence: ToPuller(pull, Heartbeat(sequence)), handler.cancel)
        reading = asyncio.create_task(self._read(pull, request_iterator, watch))
        tasks: list[asyncio.Task[Any]] = [reading, asyncio.create_task(watch.run())]
        try:
            async for action in outbound.drain():
                with watch.writing():
                    if isinstance(action, ToPuller):
                        await write(context, pull_event_to_pb(action.event))
                    else:
                        await self._send(action, outbound, context)
            if reading.done() and (complaint := reading.result()):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the puller sent nonsense: {complaint}")
        finally:
            outbound.close()
            del self._streams[pull]
            self._apply(self._core.pull_closed(pull, time.monotonic()))
            if watch.silent:
                log.warning("pull_silent", pull=pull)
            await cancel_all(tasks)

    async def _read(self, pull: int, requests: AsyncIterator[Any], watch: _Watch) -> str:
        """Until the puller has said all. Returns what is wrong with its last message; "" if nothing is."""
        try:
            async for message in requests:
                watch.heard()
                self._apply(self._core.pull_message(pull, pull_request_from_pb(message), time.monotonic()))
        except UNREADABLE as error:
            log.warning("pull_invalid_message", pull=pull, error=str(error))
            return str(error)
        finally:
            if pull in self._streams:
                self._streams[pull].close()
        return ""

    async def _send(
        self, action: SendBlock, outbound: Outbound[ToPuller | SendBlock], context: grpc.aio.ServicerContext
    ) -> None:
        """Nothing is sent once the pull is over: its block may be another tenant's."""
        for message in chunks(action.handle.position, self._cache.block_bytes(action.handle.id)):
            if outbound.closed:
                return
            self.bytes_sent += len(message.data.data)
            await write(context, message)
        self._apply(self._core.sent(action.pull, action.handle.position, time.monotonic()))


# ---- the puller -----------------------------------------------------------------------------------------------


class _Stream:
    """One Pull as its puller sees it."""

    def __init__(self, receiver: Receiver) -> None:
        self.outbound: Outbound[PullRequest] = Outbound()
        self.receiver = receiver
        self.call: Any = None
        self.done = False  # PullDone is queued: it has to get out before the stream ends
        self.task: asyncio.Task[None] | None = None
        self.pool: Pool | None = None  # the owner's memory, where this process may read it
        self.copies: deque[BlockHandle] = deque()
        self.copying: asyncio.Task[None] | None = None

    def close(self) -> None:
        self.outbound.close()
        if self.call is not None and not self.done:
            self.call.cancel()


class PullClients:
    """All Pull streams of a decode worker. `apply` carries out the core's actions, those of this class by `carry`.

    `connect` opens a channel to an address; one channel per owner is kept. Where a pull is to read the owner's memory
    and cannot, it is told to fall back, or fails if `only_memory`. Blocks are copied on a thread of their own.
    """

    def __init__(
        self,
        core: Puller,
        cache: Cache,
        apply: Apply,
        connect: Callable[[str], grpc.aio.Channel],
        *,
        only_memory: bool = False,
        digests: bool = True,
    ) -> None:
        self._core = core
        self._cache = cache
        self._apply = apply
        self._connect = connect
        self._streams: dict[int, _Stream] = {}
        self._channels: dict[str, tuple[grpc.aio.Channel, set[int]]] = {}  # least recently opened first
        self._retired: set[asyncio.Task[None]] = set()
        self._only_memory = only_memory
        self._digests = digests
        self._thread = ThreadPoolExecutor(1, "copies")
        self.pools = Pools(cache.layout)
        self.bytes_received = 0
        self.bytes_copied = 0

    def __len__(self) -> int:
        return len(self._streams)

    def carry(self, action: OpenPull | ToOwner | CopyBlock | CloseStream) -> None:
        if isinstance(action, OpenPull):
            stream = self._streams[action.pull] = _Stream(
                Receiver(action.pull, self._cache, self._core, digests=self._digests)
            )
            stream.task = asyncio.create_task(self._run(action.pull, stream, action.address, action.message))
        elif (known := self._streams.get(action.pull)) is None:
            return  # the stream ended meanwhile, and the core knows or is about to
        elif isinstance(action, ToOwner):
            known.done = known.done or isinstance(action.message, PullDone)
            known.outbound.put(action.message)
        elif isinstance(action, CopyBlock):
            known.copies.append(action.handle)
            if known.copying is None:
                known.copying = asyncio.create_task(self._copy(action.pull, known))
        else:
            known.close()

    async def close(self) -> None:
        """Ends every stream, then the channels. Each pull is reported closed before this returns."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        await cancel_all(tasks)
        for pull in list(self._streams):  # a task that was cancelled before it began has reported nothing
            del self._streams[pull]
            self._apply(self._core.pull_stream_closed(pull, time.monotonic()))
        await asyncio.gather(*self._retired)
        for channel, _ in self._channels.values():
            await channel.close()
        self._channels.clear()
        await self.pools.close()
        self._thread.shutdown()

    async def _run(self, pull: int, stream: _Stream, address: str, message: PullOpen) -> None:
        try:
            if message.transport == "memfd":
                message = await self._reach(pull, stream, address, message)
            if not stream.outbound.closed:
                await self._talk(pull, stream, address, message)
        finally:
            stream.outbound.close()
            stream.copies.clear()
            if stream.copying is not None:  # it ends with the slices under way, and nothing may be said before
                await asyncio.wait([stream.copying])
            del self._streams[pull]
            self._apply(self._core.pull_stream_closed(pull, time.monotonic()))

    async def _reach(self, pull: int, stream: _Stream, address: str, message: PullOpen) -> PullOpen:
        """The owner's memory, or the message that does without."""
        try:
            stream.pool = await self.pools.obtain(message.owner_incarnation)
        except NoPool as refusal:
            log.warning("pull_without_memory", pull=pull, owner=address, reason=str(refusal))
            if self._only_memory:
                stream.close()
                return message
            self._core.fall_back(pull, str(refusal))
            return replace(message, transport="grpc")
        return message

    async def _talk(self, pull: int, stream: _Stream, address: str, message: PullOpen) -> None:
        outbound = stream.outbound

        async def requests() -> AsyncIterator[Any]:
            yield pull_request_to_pb(message)
            async for request in outbound.drain():
                yield pull_request_to_pb(request)

        try:
            channel, users = self._channel(address, pull)
        except OSError as error:  # its certificates cannot be read at the moment
            log.warning("pull_broken", pull=pull, owner=address, error=str(error))
            return
        call = stream.call = worker_pb2_grpc.KvTransferServiceStub(channel).Pull(requests())
        watch = _Watch(outbound, Heartbeat, call.cancel)
        watching = asyncio.create_task(watch.run())
        try:
            async for event in call:
                watch.heard()
                self._on_event(pull, stream, readable(event))
        except (InvalidMessage, grpc.aio.AioRpcError) as error:
            log.warning("pull_broken", pull=pull, owner=address, error=_why(error))
        except asyncio.CancelledError:
            # Ours if close() or the watch cancelled the call; the loop's if this task is being cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if watch.silent:
                log.warning("pull_silent", pull=pull, owner=address)
        finally:
            outbound.close()
            call.cancel()
            users.discard(pull)
            await cancel_all([watching])

    async def _copy(self, pull: int, stream: _Stream) -> None:
        """While one slice is copied the one before is reported. Ends when nothing is left to copy."""
        loop = asyncio.get_running_loop()
        running: tuple[list[Copy], asyncio.Future[list[int]]] | None = None
        while running is not None or stream.copies:
            copies, pool = self._slice(pull, stream), stream.pool
            started = (
                (copies, loop.run_in_executor(self._thread, pool.copy, self._cache, copies))
                if copies and pool
                else None
            )
            if running is not None:
                done, digests = running[0], await running[1]
                for copy, digest in zip(done, digests, strict=True):
                    self._apply(self._core.copied(pull, copy.position, digest, time.monotonic()))
                self.bytes_copied += len(done) * self._cache.layout.block_bytes
            running = started
        stream.copying = None

    def _slice(self, pull: int, stream: _Stream) -> list[Copy]:
        """The next blocks that may still be written; an id that the owner's memory has not fails the pull."""
        most = max(1, SLICE_BYTES // self._cache.layout.block_bytes)
        copies: list[Copy] = []
        while stream.copies and len(copies) < most:
            handle = stream.copies.popleft()
            block = self._core.destination(pull, handle.position)
            if block is None:
                continue
            if stream.pool is None or handle.id >= stream.pool.num_blocks:
                log.warning("pull_block_out_of_range", pull=pull, block=handle.id)
                self._apply(self._core.copy_failed(pull, handle.position, time.monotonic()))
                continue
            tokens = self._core.block_tokens(pull, handle.position) if self._digests else None
            copies.append(Copy(handle.id, handle.position, block, tokens))
        return copies

    def _on_event(self, pull: int, stream: _Stream, event: Any) -> None:
        now = time.monotonic()
        if event.WhichOneof("event") != "data":
            self._apply(self._core.pull_event(pull, pull_event_from_pb(event), now))
            return
        try:
            digest = stream.receiver.receive(event.data)
        except CorruptBlock as error:
            log.warning("pull_corrupt_block", pull=pull, error=str(error))
            self._apply(self._core.copy_failed(pull, error.position, now))
            return
        self.bytes_received += len(event.data.data)
        if digest is not None:
            self._apply(self._core.copied(pull, event.data.position, digest, now))

    def _channel(self, address: str, pull: int) -> tuple[grpc.aio.Channel, set[int]]:
        if address not in self._channels:
            idle = [known for known, (_, users) in self._channels.items() if not users]
            for known in idle[: max(0, len(self._channels) - MAX_CHANNELS + 1)]:
                retiring = asyncio.create_task(self._channels.pop(known)[0].close())
                self._retired.add(retiring)
                retiring.add_done_callback(self._retired.discard)
            self._channels[address] = (self._connect(address), set())
        entry = self._channels[address]
        entry[1].add(pull)
        return entry


def _why(error: InvalidMessage | grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
