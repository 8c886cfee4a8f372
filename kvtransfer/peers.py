"""The owners that one decode worker pulls from: paired once per incarnation, with the best path that proves itself.

Owns the routes, their sources and copying threads. Pairing compares layouts, exchanges descriptors and tries the paths
that both ends offer, the best first: the first one that carries the probe blocks with their digests intact, and fast
enough, is the route of every pull until that owner's process ends. What was tried in vain is its `fallback`. A pull of
an owner that nobody has met yet waits for all this; those that a router names are met before the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio

from engine.messages import KvPath, Node, PairReply, PairRequest, TransportOffer
from kvtransfer.channels import Channels, Connect
from kvtransfer.paths import BETWEEN_PROCESSES, GB, Cache, Import, NoPath, Route, Source
from kvtransfer.prover import Prover
from kvtransfer.ticket import mismatch
from protos import worker_pb2_grpc
from wire.codec import InvalidMessage, readable
from wire.logs import get_logger
from wire.pairing import pair_reply_from_pb, pair_request_to_pb
from wire.tasks import cancel_all

log = get_logger("peers")

ASK_S = 10.0  # for one answer, for which a library of the owner's may have to start
END_S = 3.0  # for the copies of a path that is given up, before the next one is tried
RETRY_S = 10.0  # after which an owner without a usable path is asked again
MAX_PEERS = 64  # owners that are kept; the one that was met first goes when another comes

T = TypeVar("T")


class Peers:
    """`missing` says why a path that a user might expect is not among `imports`; `say` takes lines for people.

    `only` is the path that a user insists on, and `floor` the bytes per second below which none is good enough.
    """

    def __init__(
        self,
        node: Node,
        cache: Cache,
        spare: Sequence[int],
        connect: Connect,
        imports: Iterable[Import] = (),
        *,
        missing: Mapping[str, str] | None = None,
        only: str = "",
        floor: float = 0.0,
        say: Callable[[str], object] = str,
    ) -> None:
        self.channels = Channels(connect)
        self._node = node
        self._cache = cache
        self._imports = {each.kind: each for each in imports}
        self._missing = dict(missing or {})
        self._only = only
        self._say = say
        self._routes: dict[int, tuple[str, Route]] = {}  # incarnation -> address and route, the first met first
        self._pairing: dict[int, asyncio.Task[Route]] = {}  # by incarnation, as all of these
        self._meeting: dict[int, asyncio.Task[None]] = {}
        self._asking_again: dict[int, asyncio.Task[None]] = {}
        self._prover = Prover(cache, spare, self.channels, floor)
        self._sources: dict[Source, tuple[int, str]] = {}  # until they are closed: whose, and of what kind
        self._closing: set[asyncio.Task[None]] = set()  # of those, the ones that no copy may use any more
        self.paired = 0

    def __len__(self) -> int:
        return len(self._routes)

    # ---- what others may know -------------------------------------------------------------------------------------

    def paths(self) -> tuple[KvPath, ...]:
        """Plain numbers, one per owner: for `pagewire ps`, metrics and logs."""
        return tuple(_shown(address, route) for address, route in self._routes.values())

    def route_of(self, owner: Node) -> Route | None:
        known = self._routes.get(owner.incarnation)
        return None if known is None else known[1]

    def refuses(self) -> str:
        """Why this worker should get no work: it has met owners, and can pull from none of them."""
        if not self._routes or any(route.usable for _, route in self._routes.values()):
            return ""
        reasons = (f"{address} ({route.fallback})" for address, route in self._routes.values())
        return "can pull KV blocks from no prefill worker: " + ", ".join(reasons)

    # ---- meeting --------------------------------------------------------------------------------------------------

    def meet(self, owners: Iterable[Node]) -> None:
        """Pairs with those that are new, in the background; an owner that does not answer is met by its first pull, and
        so are those beyond as many as are kept."""
        for owner in owners:
            known = any(owner.incarnation in some for some in (self._routes, self._pairing, self._meeting))
            if known or owner.incarnation == self._node.incarnation:  # both stages may be this process
                continue
            if len(self._meeting) >= MAX_PEERS:
                return
            _keep_task(self._meeting, owner.incarnation, self._meet(owner))

    async def _meet(self, owner: Node) -> None:
        try:
            await self._paired(owner)
        except NoPath as refusal:
            log.warning("peer_not_met", owner=owner.address, reason=str(refusal))

    async def _ask_again(self, owner: Node) -> None:
        """Until there is a path to it, or its process has ended: a worker that refuses work is sent none that would."""
        while (known := self._routes.get(owner.incarnation)) is not None and not known[1].usable:
            await asyncio.sleep(RETRY_S)
            await self._meet(owner)

    async def reach(self, owner: Node) -> Route:
        """The proved route; raises NoPath. A path that broke is proved again, or another one takes its place."""
        known = self._routes.get(owner.incarnation)
        current = known is not None and not self._outdated(known[1])
        route = known[1] if known is not None and current else await self._paired(owner)
        if not route.usable:
            raise NoPath(route.fallback)
        return route

    async def _paired(self, owner: Node) -> Route:
        """However many wait for it. Raises NoPath if the owner does not answer."""
        if owner.incarnation not in self._pairing:
            _keep_task(self._pairing, owner.incarnation, self._pair(owner))
        return await asyncio.shield(self._pairing[owner.incarnation])

    def abort(self) -> None:
        """The process ends: copies under way end soon."""
        for source in self._sources:
            source.abort()

    async def close(self) -> None:
        """After the last pull has ended."""
        await cancel_all([*self._meeting.values(), *self._asking_again.values()])
        with contextlib.suppress(NoPath):
            await cancel_all(self._pairing.values())
        routes, self._routes = list(self._routes.values()), {}
        for _, route in routes:
            self._end(route)
        await self._prover.close()
        if self._closing:
            await asyncio.wait(self._closing)
        for each in self._imports.values():
            await each.close()
        await self.channels.close()

    def _end(self, route: Route) -> asyncio.Task[None] | None:
        """No copy begins any more; the source is closed after the one that is under way, which the task waits for."""
        if route.source is None or route.thread is None or route.ended:
            return None
        route.ended = True
        closing = asyncio.create_task(self._close(route.source, route.thread))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _close(self, source: Source, thread: ThreadPoolExecutor) -> None:
        closing = asyncio.wrap_future(thread.submit(source.close))
        thread.shutdown(wait=False)
        try:
            await closing
        finally:
            del self._sources[source]

    async def _ended(self, route: Route) -> None:
        """Two sources of one owner would get into each other's way. One whose copy does not end is not waited for: its
        path cannot be had until it has."""
        if (closing := self._end(route)) is not None:
            await asyncio.wait([closing], timeout=END_S)

    def _outdated(self, route: Route) -> bool:
        if not route.usable:
            return time.monotonic() >= route.met_at + RETRY_S
        return route.ended or route.suspect or (route.source is not None and route.source.gone)

    # ---- pairing --------------------------------------------------------------------------------------------------

    async def _pair(self, owner: Node) -> Route:
        began = time.monotonic()
        before = self._routes.get(owner.incarnation)
        if before is not None:
            await self._ended(before[1])
        try:
            route = await self._choose(owner)
        except _OwnerEnded:
            self._routes.pop(owner.incarnation, None)
            raise
        if before is not None:  # its counts go on
            old = before[1]
            route.bytes, route.transfers, route.failures = old.bytes, old.transfers, old.failures
        route.met_at = time.monotonic()
        route.warm_seconds = route.met_at - began - route.start_seconds
        self._keep(owner, route)
        return route

    async def _choose(self, owner: Node) -> Route:
        """The best path that proves itself; a route without a transport says why there is none."""
        refused: list[str] = []
        started = answered_at = 0.0
        for kind in BETWEEN_PROCESSES:
            if self._only not in ("", kind):
                continue
            if kind != "grpc" and kind not in self._imports:
                if kind in self._missing:
                    refused.append(f"{kind}: {self._missing[kind]}")
                continue
            if (owner.incarnation, kind) in self._sources.values():
                refused.append(f"{kind}: an earlier copy does not end")
                continue
            reply = await self._ask(owner, kind)
            started, answered_at = started + reply.start_seconds, time.monotonic()
            if different := mismatch(self._cache.layout, reply.layout):
                return Route("", None, fallback="; ".join(different), answered_at=answered_at)
            try:
                route = await self._try(owner, kind, reply)
            except NoPath as refusal:
                refused.append(f"{kind}: {refusal}")
                continue
            route.fallback = "; ".join(refused)
            route.start_seconds += started
            route.answered_at = answered_at
            return route
        fallback = "; ".join(refused) or f"{self._only} is not offered here"
        return Route("", None, fallback=fallback, answered_at=answered_at)

    async def _ask(self, owner: Node, kind: str) -> PairReply:
        user, request = object(), PairRequest(owner.incarnation, self._node, self._cache.layout, [TransportOffer(kind)])
        try:
            channel = self.channels.take(owner.address, user)
        except OSError as error:  # its certificates cannot be read at the moment
            raise NoPath(f"no certificate: {error}") from error
        try:
            stub = worker_pb2_grpc.KvTransferServiceStub(channel)
            return pair_reply_from_pb(readable(await stub.Pair(pair_request_to_pb(request), timeout=ASK_S)))
        except grpc.aio.AioRpcError as error:
            ended = error.code() is grpc.StatusCode.FAILED_PRECONDITION  # another process answers
            raise (_OwnerEnded if ended else NoPath)(f"{error.code().name}: {error.details()}") from error
        except InvalidMessage as error:
            raise NoPath(f"its answer is none: {error}") from error
        finally:
            self.channels.give(owner.address, user)

    async def _try(self, owner: Node, kind: str, reply: PairReply) -> Route:
        """This path, proved and measured. Raises NoPath."""
        offer = next((offer.metadata for offer in reply.transports if offer.kind == kind), None)
        if offer is None:
            raise NoPath("not offered by its owner")
        route = Route(kind, None)
        if kind != "grpc":
            route.start_seconds = await self._imports[kind].prepare()
            route.source = await self._imports[kind].connect(owner, offer)
            route.thread = ThreadPoolExecutor(1, f"copies-{kind}")
            self._sources[route.source] = (owner.incarnation, kind)
        try:
            await self._prover.prove(owner, route, reply.probe_blocks)
        except BaseException:
            await self._ended(route)
            raise
        return route

    def _keep(self, owner: Node, route: Route) -> None:
        """Of two processes at one address the one that answered last has it. Raises NoPath if that is the other."""
        for incarnation, (address, other) in list(self._routes.items()):
            if address != owner.address or incarnation == owner.incarnation:
                continue
            if other.answered_at > route.answered_at:
                self._end(route)
                self._routes.pop(owner.incarnation, None)
                raise _OwnerEnded("another process answers at its address now")
            self._end(self._routes.pop(incarnation)[1])
        while len(self._routes.keys() - {owner.incarnation}) >= MAX_PEERS:
            self._end(self._routes.pop(next(iter(self._routes)))[1])
        self._routes[owner.incarnation] = (owner.address, route)
        self.paired += 1
        log.info(
            "peer_met",
            owner=owner.address,
            path=route.transport or "none",
            gb_per_second=round(route.bytes_per_second / GB, 3),
            warm_ms=round(route.warm_seconds * 1e3, 1),
            start_ms=round(route.start_seconds * 1e3, 1),
            fallback=route.fallback,
        )
        self._say(str(_shown(owner.address, route)))
        if not route.usable and owner.incarnation not in self._asking_again:
            _keep_task(self._asking_again, owner.incarnation, self._ask_again(owner))


def _shown(address: str, route: Route) -> KvPath:
    return KvPath(
        address,
        route.transport,
        route.bytes_per_second,
        route.warm_seconds,
        route.fallback,
        route.bytes,
        route.transfers,
        dict(route.failures),
        route.start_seconds,
    )


class _OwnerEnded(NoPath):
    """Nobody will answer as this incarnation again."""


def _keep_task(tasks: dict[int, asyncio.Task[T]], incarnation: int, work: Coroutine[Any, Any, T]) -> None:
    """In `tasks` until it ends."""
    tasks[incarnation] = task = asyncio.create_task(work)
    task.add_done_callback(lambda _: tasks.pop(incarnation, None))
