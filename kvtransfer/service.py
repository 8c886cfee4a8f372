"""Pull streams over grpc.aio: the owner's servicer, and the puller's client.

Both carry messages between a stream and a sans-IO core, and bytes between a stream and the cache; neither
decides anything. Each stream heartbeats when it is quiet and ends after 3 s of silence, whatever the transport
below believes. Every stream ends in exactly one pull_closed or pull_stream_closed, after its last read or write.
All of it runs on the loop, so a core's word on who may read or write holds until the next await.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from engine.messages import (
    BlockHandle,
    Heartbeat,
    Node,
    PairReply,
    PullDone,
    PullEvent,
    PullOpen,
    PullRequest,
    TransportOffer,
)
from kvtransfer.actions import Action, ClosePull, CloseStream, CopyBlock, OpenPull, SendBlock, ToOwner, ToPuller
from kvtransfer.channels import Channels
from kvtransfer.paths import Cache, Copy, CopyFailed, Export, NoPath, Route
from kvtransfer.probe import PROBE_TICKET, ProbeOwner
from kvtransfer.ticket import mismatch
from kvtransfer.transports.grpc_bytes import Chunk, CorruptBlock, Destinations, Receiver, chunks, decoded, encoded
from protos import worker_pb2, worker_pb2_grpc
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
from wire.logs import about, get_logger
from wire.pairing import pair_reply_to_pb, pair_request_from_pb
from wire.session import Outbound
from wire.tasks import cancel_all

log = get_logger("kvtransfer")

FLUSH_S = SILENCE_S  # how long a stream that we closed may take to send what was queued before

Apply = Callable[[list[Action]], None]


class PullOwner(Protocol):
    """The prefiller."""

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]: ...
    def sent(self, pull: int, position: int, now: float) -> list[Action]: ...
    def pull_closed(self, pull: int, now: float) -> list[Action]: ...


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


_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name


def add_to_server(service: Any, server: grpc.aio.Server) -> None:
    """Pair and Pull of whoever has these two methods, such as a prefill worker's servicer."""
    handlers: dict[str, Any] = {
        "Pair": grpc.unary_unary_rpc_method_handler(
            service.Pair, _pair_request, worker_pb2.PairReply.SerializeToString
        ),
        "Pull": grpc.stream_stream_rpc_method_handler(service.Pull, worker_pb2.PullRequest.FromString, encoded),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


def _pair_request(data: bytes) -> worker_pb2.PairRequest | None:
    """None for bytes that are no such message: raising here would look like our fault."""
    try:
        return worker_pb2.PairRequest.FromString(data)
    except DecodeError:
        return None


def pull_of(channel: grpc.aio.Channel) -> Any:
    """The stub's Pull, whose events are PullEvents and Chunks."""
    return channel.stream_stream(f"/{_SERVICE}/Pull", worker_pb2.PullRequest.SerializeToString, decoded)


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


class _Serving:
    """One Pull as its owner sees it. `core` is known once the puller has said what it pulls."""

    def __init__(self) -> None:
        self.outbound: Outbound[ToPuller | SendBlock] = Outbound()
        self.core: PullOwner | None = None
        self.request_id = ""
        self.export: Export | None = None  # of the path by which it comes, if that is not the stream


class KvTransferService(worker_pb2_grpc.KvTransferServiceServicer):
    """Serves Pair and Pull. `apply` carries out the core's actions, those of this class through `carry`.

    Pulls of the probe's ticket are `probe`'s; without one nobody can pair with this owner.
    """

    def __init__(
        self,
        core: PullOwner,
        cache: Cache,
        apply: Apply,
        *,
        node: Node,
        probe: ProbeOwner | None = None,
        exports: Sequence[Export] = (),
        transports: Sequence[str] = ("grpc",),
    ) -> None:
        self._core = core
        self._cache = cache
        self._apply = apply
        self._probe = probe
        self._node = node
        self._exports = {export.kind: export for export in exports}
        self._transports = tuple(transports)
        self._streams: dict[int, _Serving] = {}
        self._last_pull = 0
        self.bytes_sent = 0
        self.paired = 0
        self.refused: Counter[str] = Counter()  # Pair calls, by reason

    def __len__(self) -> int:
        return len(self._streams)

    def carry(self, action: ToPuller | SendBlock | ClosePull) -> None:
        serving = self._streams.get(action.pull)
        if serving is None:
            return  # the stream ended meanwhile, and the core knows or is about to
        if isinstance(action, ClosePull):
            serving.outbound.close()
        else:
            serving.outbound.put(action)

    def _act(self, core: PullOwner, actions: list[Action]) -> None:
        if core is not self._probe:
            self._apply(actions)
            return
        for action in actions:
            self.carry(action)  # type: ignore[arg-type]  # a probe's actions are all this class's

    async def Pair(
        self, request: worker_pb2.PairRequest | None, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PairReply:
        """Descriptors, once per puller. Those of a layout that differs would mean something else to it."""
        if request is None:
            self.refused["unreadable"] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the puller sent nonsense: it is no PairRequest")
        asked = pair_request_from_pb(request)
        if asked.owner_incarnation != self._node.incarnation:
            self.refused["another incarnation"] += 1
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another process answers at this address now")
        layout = self._cache.layout
        if different := mismatch(layout, asked.layout):
            self.refused["another layout"] += 1
            log.warning("pair_of_another_layout", puller=asked.puller.address or asked.puller.name, fields=different)
            return pair_reply_to_pb(PairReply(self._node, layout))
        self.paired += 1
        began = time.monotonic()
        offers = await self._offers({offer.kind for offer in asked.transports})
        probes = 0 if self._probe is None else len(self._probe.handles)
        return pair_reply_to_pb(PairReply(self._node, layout, offers, probes, time.monotonic() - began))

    async def _offers(self, wanted: set[str]) -> list[TransportOffer]:
        offers = []
        for kind in self._transports:
            metadata = b""
            if kind in wanted and kind in self._exports:
                try:
                    metadata = await self._exports[kind].offer()
                except NoPath as refusal:
                    self.refused[f"{kind}: {refusal}"] += 1
                    log.warning("path_not_offered", path=kind, reason=str(refusal))
                    continue
            offers.append(TransportOffer(kind, metadata))
        return offers

    async def Pull(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        self._last_pull += 1
        pull = self._last_pull
        serving = self._streams[pull] = _Serving()
        outbound = serving.outbound
        handler = asyncio.current_task()
        assert handler is not None, "a Pull handler runs in a task"
        watch = _Watch(outbound, lambda sequence: ToPuller(pull, Heartbeat(sequence)), handler.cancel)
        reading = asyncio.create_task(self._read(pull, serving, request_iterator, watch))
        tasks: list[asyncio.Task[Any]] = [reading, asyncio.create_task(watch.run())]
        try:
            async for action in outbound.drain():
                with watch.writing():
                    if isinstance(action, ToPuller):
                        await write(context, pull_event_to_pb(action.event))
                    else:
                        await self._send(action, serving, context)
            if reading.done() and (complaint := reading.result()):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the puller sent nonsense: {complaint}")
        finally:
            outbound.close()
            del self._streams[pull]
            if serving.export is not None:
                serving.export.closed()
            if serving.core is not None:
                self._act(serving.core, serving.core.pull_closed(pull, time.monotonic()))
            if watch.silent:
                log.warning("pull_silent", pull=pull, request_id=serving.request_id)
            await cancel_all(tasks)

    async def _read(self, pull: int, serving: _Serving, requests: AsyncIterator[Any], watch: _Watch) -> str:
        """Until the puller has said all. Returns what is wrong with its last message; "" if nothing is."""
        try:
            async for message in requests:
                watch.heard()
                said = pull_request_from_pb(message)
                if serving.core is None:
                    if isinstance(said, PullOpen):
                        serving.request_id = said.request_id
                        about(said.request_id)
                    serving.core = self._core_for(said)
                    serving.export = self._exports.get(said.transport) if isinstance(said, PullOpen) else None
                    if serving.export is not None:
                        serving.export.opened()
                self._act(serving.core, serving.core.pull_message(pull, said, time.monotonic()))
        except UNREADABLE as error:
            log.warning("pull_invalid_message", pull=pull, error=str(error))
            return str(error)
        finally:
            serving.outbound.close()
        return ""

    def _core_for(self, first: PullRequest) -> PullOwner:
        probes = isinstance(first, PullOpen) and first.ticket == PROBE_TICKET
        return self._core if self._probe is None or not probes else self._probe

    async def _send(self, action: SendBlock, serving: _Serving, context: grpc.aio.ServicerContext) -> None:
        """Nothing is sent once the pull is over: its block may be another tenant's."""
        data = self._cache.block_bytes(action.handle.id)
        for message in chunks(action.handle.position, data):
            if serving.outbound.closed:
                return
            await write(context, message)
        self.bytes_sent += len(data)
        core = serving.core
        assert core is not None, f"pull {action.pull} sends before it is open"
        self._act(core, core.sent(action.pull, action.handle.position, time.monotonic()))


# ---- the puller -----------------------------------------------------------------------------------------------


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

    def carry(self, action: OpenPull | ToOwner | CopyBlock | CloseStream) -> None:
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
        elif isinstance(action, CopyBlock):
            known.copies.append(action.handle)
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
        watch = _Watch(outbound, Heartbeat, call.cancel)
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
        """While one slice is copied the one before is reported. Ends when nothing is left to copy."""
        route, loop = stream.route, asyncio.get_running_loop()
        assert route is not None and route.source is not None, f"pull {pull} copies without a source"
        source = route.source
        running: tuple[list[Copy], asyncio.Future[list[int]]] | None = None
        while running is not None or stream.copies:
            copies = self._slice(pull, stream, source.slice_bytes)
            started = (copies, loop.run_in_executor(route.thread, source.copy, self._cache, copies)) if copies else None
            if running is not None:
                await self._copied(pull, stream, route, *running)
            running = started
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
