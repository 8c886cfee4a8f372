"""The owner's half of pairs and Pull streams over grpc.aio: messages to and from a core, bytes out of the cache.

Decides nothing. A stream heartbeats when it is quiet and ends after 3 s of silence (kvtransfer.watch), and each ends in
exactly one pull_closed, after its last write. All of it runs on the loop, so a core's word on what may be read holds
until the next await. The puller's half is kvtransfer.pulls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from engine.messages import Heartbeat, Node, PairReply, PullOpen, PullRequest, TransportOffer
from kvtransfer.actions import Action, ClosePull, SendBlock, ToPuller
from kvtransfer.paths import Cache, Export, NoPath
from kvtransfer.probe import PROBE_TICKET, ProbeOwner
from kvtransfer.ticket import mismatch
from kvtransfer.transports.grpc_bytes import SERVICE, chunks, encoded
from kvtransfer.watch import Watch
from protos import worker_pb2, worker_pb2_grpc
from wire.channel import write
from wire.codec import UNREADABLE
from wire.logs import about, get_logger
from wire.pairing import pair_reply_to_pb, pair_request_from_pb
from wire.pulling import pull_event_to_pb, pull_request_from_pb
from wire.session import Outbound
from wire.tasks import cancel_all

log = get_logger("kvtransfer")

Apply = Callable[[list[Action]], None]


class PullOwner(Protocol):
    """The prefiller."""

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]: ...
    def sent(self, pull: int, position: int, now: float) -> list[Action]: ...
    def pull_closed(self, pull: int, now: float) -> list[Action]: ...


def add_to_server(service: Any, server: grpc.aio.Server) -> None:
    """Pair and Pull of whoever has these two methods, such as a prefill worker's servicer."""
    handlers: dict[str, Any] = {
        "Pair": grpc.unary_unary_rpc_method_handler(
            service.Pair, _pair_request, worker_pb2.PairReply.SerializeToString
        ),
        "Pull": grpc.stream_stream_rpc_method_handler(service.Pull, worker_pb2.PullRequest.FromString, encoded),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _pair_request(data: bytes) -> worker_pb2.PairRequest | None:
    """None for bytes that are no such message: raising here would look like our fault."""
    try:
        return worker_pb2.PairRequest.FromString(data)
    except DecodeError:
        return None


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
        watch = Watch(outbound, lambda sequence: ToPuller(pull, Heartbeat(sequence)), handler.cancel)
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

    async def _read(self, pull: int, serving: _Serving, requests: AsyncIterator[Any], watch: Watch) -> str:
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
