"""The puller's half of Pull streams over grpc.aio: messages to and from a core, bytes into the cache.

Decides nothing. A stream heartbeats when it is quiet and ends after 3 s of silence (kvtransfer.watch), and each ends in
exactly one pull_stream_closed, after the last write of whatever copies for it. Copies of a one-sided path run on its
source's thread; all else is on the loop, so a core's word on what may be written holds until the next await.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import grpc.aio

from engine.messages import BlockHandle, Heartbeat, Node, PullDone, PullEvent, PullOpen, PullRequest
from kvtransfer.actions import Action, CloseStream, CopyBlocks, OpenPull, ToOwner
from kvtransfer.channels import Channels
from kvtransfer.paths import Cache, Copy, CopyFailed, NoPath, Route
from kvtransfer.transports.grpc_bytes import Chunk, CorruptBlock, Destinations, Receiver, pull_of
from kvtransfer.watch import Watch
from wire.codec import InvalidMessage, readable
from wire.logs import about, get_logger
from wire.pulling import pull_event_from_pb, pull_request_to_pb
from wire.session import Outbound
from wire.tasks import cancel_all

log = get_logger("kvtransfer")

Apply = Callable[[list[Action]], None]


class Puller(Destinations, Protocol):
    """The decoder."""

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]: ...
    def copied(self, pull: int, digests: Mapping[int, int], now: float) -> list[Action]: ...
    def copy_failed(self, pull: int, position: int, now: float) -> list[Action]: ...
    def pull_stream_closed(self, pull: int, now: float) -> list[Action]: ...
    def reroute(self, pull: int, transport: str, path: str) -> None: ...
    def no_path(self, pull: int, cause: str, now: float) -> list[Action]: ...


class Reach(Protocol):
    """Who knows the way to each owner."""

    async def reach(self, owner: Node) -> Route:
        """Proved already, or proved now. Raises NoPath."""


class _Stream:
    """One Pull as its puller sees it."""

    def __init__(self, receiver: Receiver, request_id: str) -> None:
        self.outbound: Outbound[PullRequest] = Outbound()
        self.receiver = receiver
        self.call: Any = None
        self.done = False  # PullDone is queued: it has to get out before the stream ends
        self.task: asyncio.Task[None] | None = None
        self.route: Route | None = None
        self.trouble = ""  # why it failed, for the counts
        self.context = contextvars.copy_context()  # of its tasks: what they log concerns one request
        self.context.run(about, request_id)
        self.copies: deque[BlockHandle] = deque()
        self.copying: asyncio.Task[None] | None = None

    def close(self) -> None:
        self.outbound.close()
        if self.call is not None and not self.done:
            self.call.cancel()


class PullClients:
    """All Pull streams of a decode worker. `apply` carries out the core's actions, those of this class by `carry`.

    `peers` knows the way to each owner, and a pull whose owner cannot be reached fails. Blocks of a one-sided path are
    copied on its source's thread, a slice at a time; everything else is on the loop.
    """

    def __init__(
        self, core: Puller, cache: Cache, apply: Apply, peers: Reach, channels: Channels, *, digests: bool = True
    ) -> None:
        self._core = core
        self._cache = cache
        self._apply = apply
        self._peers = peers
        self._channels = channels
        self._digests = digests
        self._streams: dict[int, _Stream] = {}
        self.bytes_received = 0
        self.bytes_copied = 0

    def __len__(self) -> int:
        return len(self._streams)

    def carry(self, action: OpenPull | ToOwner | CopyBlocks | CloseStream) -> None:
        if isinstance(action, OpenPull):
            receiver = Receiver(action.pull, self._cache, self._core, digests=self._digests)
            stream = self._streams[action.pull] = _Stream(receiver, action.message.request_id)
            running = self._run(action.pull, stream, action.address, action.message)
            stream.task = asyncio.create_task(running, context=stream.context)
        elif (known := self._streams.get(action.pull)) is None:
            return  # the stream ended meanwhile, and the core knows or is about to
        elif isinstance(action, ToOwner):
            known.done = known.done or isinstance(action.message, PullDone)
            known.outbound.put(action.message)
        elif isinstance(action, CopyBlocks):
            known.copies += action.handles
            if known.copying is None:
                known.copying = asyncio.create_task(self._copy(action.pull, known), context=known.context)
        else:
            if action.reason is not None:
                known.trouble = known.trouble or action.reason.name.lower()
            known.close()

    async def close(self) -> None:
        """Ends every stream. Each pull is reported closed before this returns."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        await cancel_all(tasks)
        for pull in list(self._streams):  # a task that was cancelled before it began has reported nothing
            del self._streams[pull]
            self._apply(self._core.pull_stream_closed(pull, time.monotonic()))

    async def _run(self, pull: int, stream: _Stream, address: str, message: PullOpen) -> None:
        try:
            if (opening := await self._find(pull, stream, address, message)) is not None:
                await self._talk(pull, stream, address, opening)
        finally:
            stream.outbound.close()
            stream.copies.clear()
            if stream.copying is not None:  # it ends with the slices under way, and nothing may be said before
                await asyncio.wait([stream.copying])
            del self._streams[pull]
            self._count(stream)
            self._apply(self._core.pull_stream_closed(pull, time.monotonic()))

    async def _find(self, pull: int, stream: _Stream, address: str, message: PullOpen) -> PullOpen | None:
        """The message with the path to this owner; None if there is no path, or nobody waits for one any more."""
        try:
            if message.transport == "local":  # a stage that lends its blocks would have kept this pull to itself
                raise NoPath("its ticket names this worker, which lends no blocks")
            route = await self._peers.reach(Node("", message.owner_incarnation, address))
        except NoPath as refusal:
            log.warning("pull_without_path", pull=pull, owner=address, reason=str(refusal))
            if not stream.outbound.closed:
                self._apply(self._core.no_path(pull, str(refusal), time.monotonic()))
            return None
        if stream.outbound.closed:
            return None
        stream.route = route
        if route.transport != message.transport or route.fallback:
            self._core.reroute(pull, route.transport, str(route))
        return replace(message, transport=route.transport)

    def _count(self, stream: _Stream) -> None:
        if (route := stream.route) is None:
            return
        if stream.done:
            route.transfers += 1
        elif stream.trouble:
            route.failures[stream.trouble] += 1

    async def _talk(self, pull: int, stream: _Stream, address: str, message: PullOpen) -> None:
        outbound = stream.outbound

        async def requests() -> AsyncIterator[Any]:
            yield pull_request_to_pb(message)
            async for request in outbound.drain():
                yield pull_request_to_pb(request)

        try:
            channel = self._channels.take(address, stream)
        except OSError as error:  # its certificates cannot be read at the moment
            log.warning("pull_broken", pull=pull, owner=address, error=str(error))
            stream.trouble = "no certificate"
            return
        call = stream.call = pull_of(channel)(requests())
        watch = Watch(outbound, Heartbeat, call.cancel)
        watching = asyncio.create_task(watch.run())
        try:
            async for event in call:
                watch.heard()
                self._on_event(pull, stream, readable(event))
        except (InvalidMessage, grpc.aio.AioRpcError) as error:
            log.warning("pull_broken", pull=pull, owner=address, error=_why(error))
            stream.trouble = stream.trouble or "stream broken"
        except asyncio.CancelledError:
            # Ours if close() or the watch cancelled the call; the loop's if this task is being cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if watch.silent:
                log.warning("pull_silent", pull=pull, owner=address)
                stream.trouble = "owner silent"
        finally:
            outbound.close()
            call.cancel()
            self._channels.give(address, stream)
            await cancel_all([watching])

    async def _copy(self, pull: int, stream: _Stream) -> None:
        """While one slice is copied the one before is reported. Ends when nothing is left to copy, and whatever goes
        wrong not before the last slice has ended: until then its blocks are nobody else's."""
        route, loop = stream.route, asyncio.get_running_loop()
        assert route is not None and route.source is not None, f"pull {pull} copies without a source"
        source = route.source
        under_way: deque[tuple[list[Copy], asyncio.Future[list[int]]]] = deque()
        try:
            while under_way or stream.copies:
                if copies := self._slice(pull, stream, source.slice_bytes):
                    copying = loop.run_in_executor(route.thread, source.copy, self._cache, copies)
                    under_way.append((copies, copying))
                if under_way and (len(under_way) > 1 or not copies):
                    await self._copied(pull, stream, route, *under_way[0])
                    under_way.popleft()
        finally:
            if under_way:  # something of ours is broken, and the loop says what
                stream.trouble = stream.trouble or "copy broken"
                stream.close()
                await asyncio.wait([copying for _, copying in under_way])
            stream.copying = None

    async def _copied(
        self, pull: int, stream: _Stream, route: Route, copies: list[Copy], copying: asyncio.Future[list[int]]
    ) -> None:
        try:
            digests = await copying
        except CopyFailed as failure:
            log.warning("pull_copy_failed", pull=pull, reason=str(failure))
            stream.trouble = stream.trouble or str(failure)
            route.suspect = True
            self._apply(self._core.copy_failed(pull, copies[0].position, time.monotonic()))
            return
        found = {copy.position: digest for copy, digest in zip(copies, digests, strict=True)}
        self._apply(self._core.copied(pull, found, time.monotonic()))
        moved = len(copies) * self._cache.layout.block_bytes
        self.bytes_copied += moved
        route.bytes += moved

    def _slice(self, pull: int, stream: _Stream, size: int) -> list[Copy]:
        """The next blocks, of `size` bytes, that may still be written; an id that is not the owner's fails the pull."""
        most = max(1, size // self._cache.layout.block_bytes)
        copies: list[Copy] = []
        while stream.copies and len(copies) < most:
            handle = stream.copies.popleft()
            block = self._core.destination(pull, handle.position)
            if block is None:
                continue
            if (unfit := _unfit(stream.route, handle)) is not None:
                log.warning("pull_block_refused", pull=pull, block=handle.id, reason=unfit)
                stream.trouble = stream.trouble or unfit
                self._apply(self._core.copy_failed(pull, handle.position, time.monotonic()))
                continue
            tokens = self._core.block_tokens(pull, handle.position) if self._digests else None
            copies.append(Copy(handle.id, handle.position, block, tokens))
        return copies

    def _on_event(self, pull: int, stream: _Stream, event: Any) -> None:
        now = time.monotonic()
        if not isinstance(event, Chunk):
            self._apply(self._core.pull_event(pull, pull_event_from_pb(event), now))
            return
        try:
            digest = stream.receiver.receive(event)
        except CorruptBlock as error:
            log.warning("pull_corrupt_block", pull=pull, error=str(error))
            stream.trouble = stream.trouble or "corrupt block"
            self._apply(self._core.copy_failed(pull, error.position, now))
            return
        self.bytes_received += len(event.data)
        if stream.route is not None:
            stream.route.bytes += len(event.data)
        if digest is not None:
            self._apply(self._core.copied(pull, {event.position: digest}, now))


def _unfit(route: Route | None, handle: BlockHandle) -> str | None:
    if route is None or route.source is None or route.ended:
        return "path closed"
    return "block out of range" if handle.id >= route.source.num_blocks else None


def _why(error: InvalidMessage | grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
