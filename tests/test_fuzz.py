"""Nonsense against every RPC, in process and on the wire: it costs its sender a status and nobody else anything.

In process: bytes are parsed, read by the codec and given to the sans-IO cores, beside a bystander whose request must
come out right. On the wire: raw bytes to real processes. A status is never UNKNOWN or INTERNAL, no log has a
traceback, every block comes back.
"""

from __future__ import annotations

import asyncio
import random
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from decode_world import OWNER, SIZE, VOCAB, World
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import (
    PARAMS,
    decode_commands,
    nonsense,
    odd,
    prefill_commands,
    public_corpus,
    pull_requests,
    tokens_of,
    worker_events,
)
from router_front import HELLO, make_model_dir, running_front

from engine import messages as m
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.types import Token
from kvtransfer.actions import Action, OpenPull, SendBlock, ToPuller, ToRouter
from kvtransfer.ticket import layout_digest
from kvtransfer.transports.grpc_bytes import Chunk, CorruptBlock, Receiver, chunks, decoded
from prefill_service.prefiller import Prefiller
from protos import worker_pb2 as wpb
from router import border
from router.actions import RouterRequest
from router.admission import RouterConfig
from router.dispatch import Dispatcher
from router.status import RequestError, abort
from router.workers import Role
from wire import codec, pulling

NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
MINE, FUZZ = 1, 2  # sessions: the bystander's, and the one that talks nonsense


def understood(data: bytes, kind: type[Message], from_pb: Callable[[Any], Any]) -> Any:
    """What a peer makes of these bytes; None where it turns them down, in one of the two ways that it may."""
    try:
        return from_pb(kind.FromString(data))
    except (DecodeError, codec.InvalidMessage):
        return None


# ---- in process: the codec ----------------------------------------------------------------------------------------

TICKET = m.Ticket(9, OWNER, 10, 3, 60.0, (b"h" * 32,) * 2)
KEY = m.RequestKey(5, 1, 1)
READERS: list[tuple[type[Message], Callable[[Any], Any], list[Message]]] = [
    (wpb.PrefillCommand, codec.prefill_command_from_pb, prefill_commands(5)),
    (wpb.DecodeCommand, codec.decode_command_from_pb, decode_commands(5, TICKET)),
    (wpb.PullRequest, pulling.pull_request_from_pb, pull_requests(TICKET, KEY, b"d")),
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader[0].DESCRIPTOR.name)
def test_whatever_the_bytes_reading_them_gives_a_value_or_says_no(reader: Any) -> None:
    kind, from_pb, corpus = reader
    rng = random.Random(1)
    read = sum(understood(nonsense(rng, corpus), kind, from_pb) is not None for _ in range(20_000))
    assert read > 2000, f"only {read} were understood: nothing deep is tried"


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200), number=st.integers(0, len(READERS) - 1), randoms=st.randoms())
def test_what_hypothesis_thinks_of_gives_a_value_or_a_no(data: bytes, number: int, randoms: random.Random) -> None:
    kind, from_pb, corpus = READERS[number]
    understood(data, kind, from_pb)
    understood(odd(randoms.choice(corpus), randoms, 0.5).SerializeToString(), kind, from_pb)


# ---- in process: the cores ----------------------------------------------------------------------------------------


def run_step(core: Any, runner: FakeRunner, now: float) -> list[Action]:
    batch = core.next_batch(now)
    if batch is None:
        return []
    for row in batch.rows:
        assert all(0 <= token < VOCAB for token in row.tokens), f"the engine is given {row.tokens}"
    return core.on_step(runner.step(batch), now)


class PrefillWorker:
    """A Prefiller with a fake device; what it tells the routers and the pullers is kept."""

    def __init__(self, blocks: int = 64) -> None:
        self.runner = FakeRunner(16, blocks, VOCAB)
        self.pool = BlockPool(blocks)
        config = EngineConfig(block_size=16, num_blocks=blocks, max_num_batched_tokens=16, max_model_len=200)
        self.core = Prefiller(
            OWNER, self.runner.layout, config, self.pool, vocab_size=VOCAB, eos_token_ids=(), rng=random.Random(3)
        )
        self.now = 100.0
        self.heard: dict[int, list[Any]] = {MINE: [], FUZZ: []}
        self.pulled: dict[int, list[Any]] = {}
        for session in (MINE, FUZZ):
            self.apply(self.core.attach(session, m.RouterHello(f"r{session}", 1, 1), self.now))

    def apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToRouter(session, event):
                    self.heard[session].append(event)
                case ToPuller(pull, event):
                    self.pulled.setdefault(pull, []).append(event)
                case SendBlock(pull, handle):
                    self.apply(self.core.sent(pull, handle.position, self.now))

    def step(self) -> None:
        self.now += 0.05
        self.apply(run_step(self.core, self.runner, self.now))

    def tickets(self, session: int) -> list[tuple[m.RequestKey, m.Ticket]]:
        accepted = (event for event in self.heard[session] if isinstance(event, m.PrefillAccepted))
        return [(event.key, event.ticket) for event in accepted]


def test_a_prefill_worker_takes_nonsense_on_both_its_services_and_serves_its_other_router() -> None:
    worker, rng = PrefillWorker(), random.Random(11)
    core = worker.core
    start = m.PrefillStart(KEY, tokens_of(5, 90), 0, PARAMS, 1e5, 0.0)
    worker.apply(core.on_command(MINE, start, worker.now))
    digest, pull, mine = layout_digest(worker.runner.layout), 1, 10**6
    ((_, ticket),) = worker.tickets(MINE)
    opening = m.PullOpen(ticket.id, KEY._replace(placement=1), OWNER.incarnation, "grpc", digest)
    worker.apply(core.pull_message(mine, opening, worker.now))
    for turn in range(15_000):
        if turn % 7:
            data = nonsense(rng, prefill_commands(turn // 20))
            command = understood(data, wpb.PrefillCommand, codec.prefill_command_from_pb)
            if command is not None and not isinstance(command, m.Drain | m.RouterHello):
                worker.apply(core.on_command(FUZZ, command, worker.now))
        elif known := worker.tickets(FUZZ)[-3:]:
            key, ticket = rng.choice(known)
            corpus = pull_requests(ticket, key._replace(placement=pull), digest)
            pull += 1
            for _ in range(rng.randint(1, 5)):
                request = understood(nonsense(rng, corpus), wpb.PullRequest, pulling.pull_request_from_pb)
                if request is not None:
                    worker.apply(core.pull_message(pull, request, worker.now))
            if rng.random() < 0.9:
                worker.apply(core.pull_closed(pull, worker.now))
        if turn % 5 == 0:
            worker.step()
        if turn % 200 == 0:
            worker.apply(core.tick(worker.now))
            core.audit()
    worker.apply(core.detach(FUZZ, worker.now))
    assert len(worker.tickets(FUZZ)) > 30 and len(worker.pulled) > 100, "hardly anything was understood"
    (first,) = [event for event in worker.heard[MINE] if isinstance(event, m.FirstToken)]
    assert first.token.token_id == fake_tokens(tokens_of(5, 90), 1, VOCAB)[0]
    assert worker.pulled[mine][-1] == first, "its puller has heard all of it"
    worker.apply(core.pull_message(mine, m.PullDone(), worker.now))
    worker.step()
    core.audit()
    assert core.idle and worker.pool.available == worker.pool.num_blocks


class Bystander(World):
    """A decode world whose first session is served by an owner, and whose second talks nonsense to its own pulls."""

    def __init__(self, blocks: int) -> None:
        self.pulls: dict[int, Receiver] = {}  # of the second session, open
        self.messages = 0  # that reached an open pull
        self.running = 0  # requests of the second session that reached the engine
        super().__init__(blocks)
        self.apply(self.core.attach(FUZZ, m.RouterHello("other", 6, 1), self.now))

    def apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToRouter(session, event) if session == FUZZ:
                    self.running += isinstance(event, m.FirstToken)
                case OpenPull(pull, _, message) if message.ticket != 1:
                    self.pulls[pull] = Receiver(pull, self.runner.cache, self.core)
                case _ if getattr(action, "pull", None) in self.pulls:
                    pass
                case _:
                    super().apply([action])

    def hear(self, pull: int, data: bytes) -> None:
        """One message on one pull of the second session. One that is turned down would end its stream; here it goes on,
        so that something deep is tried."""
        try:
            event = decoded(data)
            if not isinstance(event, Chunk):
                self.apply(self.core.pull_event(pull, pulling.pull_event_from_pb(event), self.now))
            elif (digest := self.pulls[pull].receive(event)) is not None:
                self.apply(self.core.copied(pull, {event.position: digest}, self.now))
            self.messages += 1
        except (DecodeError, codec.InvalidMessage):
            pass
        except CorruptBlock as error:
            self.apply(self.core.copy_failed(pull, error.position, self.now))

    def close(self, pull: int) -> None:
        del self.pulls[pull]
        self.apply(self.core.pull_stream_closed(pull, self.now))


def pull_events(world: Bystander, request: int, first: int) -> list[Message]:
    """What a good owner would say of this request, with blocks of zeroes and this token 0."""
    key, cache = m.RequestKey(request, 1), world.runner.cache
    empty = FakeRunner(SIZE, 1, VOCAB).cache
    tokens = tokens_of(request)
    digests = [empty.digest(0, place, tokens[place * SIZE : (place + 1) * SIZE]) for place in range(3)]
    handles = [m.BlockHandle(place + 4, 0, place, digest) for place, digest in enumerate(digests)]
    events: list[m.PullEvent] = [
        m.PullOpened(layout_digest(cache.layout)),
        m.BlocksSealed(tuple(handles)),
        m.BlocksSealed(tuple(handles[:1])),
        m.FirstToken(key, Token(0, first)),
        m.Failed(key, m.Reason.STALE_TICKET, True),
        m.Heartbeat(1),
    ]
    data = [wpb.PullEvent.FromString(each) for place in range(3) for each in chunks(place, empty.block_bytes(0))]
    return [*(pulling.pull_event_to_pb(event) for event in events), *data]


def test_a_decode_worker_takes_nonsense_from_router_and_owner_and_serves_its_other_router() -> None:
    world, rng = Bystander(64), random.Random(12)
    mine = world.submit(tokens_of(1, 9), 60)
    for turn in range(15_000):
        request = 100 + turn // 60
        ticket = m.Ticket(request, OWNER._replace(name="q"), 10, 3, 60.0)
        if turn % 3 == 0:
            commands = decode_commands(request, ticket)
            data = commands[0].SerializeToString() if turn % 60 == 0 else nonsense(rng, commands)
            command = understood(data, wpb.DecodeCommand, codec.decode_command_from_pb)
            if command is not None and not isinstance(command, m.Drain | m.RouterHello):
                world.apply(world.core.on_command(FUZZ, command, world.now))
        elif world.pulls:
            pull = rng.choice(list(world.pulls))
            says = pull_events(world, request, rng.choice((42, 42, VOCAB, 2**32 - 1)))
            if rng.random() < 0.5:  # all that a good owner says, with hardly anything wrong
                whole = [says[0], says[1], *says[6:], says[3]]
                hear = [odd(message, rng, 0.02).SerializeToString() for message in whole]
            else:
                hear = [nonsense(rng, says)]
            for data in hear:
                world.hear(pull, data)
            if pull in world.pulls and rng.random() < 0.1:
                world.close(pull)
        world.now += 0.01
        if turn % 5 == 0:
            world.transfer()
            world.apply(run_step(world.core, world.runner, world.now))
        if turn % 200 == 0:
            world.apply(world.core.tick(world.now))
    world.apply(world.core.detach(FUZZ, world.now))
    for pull in list(world.pulls):
        world.close(pull)
    assert world.messages > 500, "hardly anything was understood"
    assert world.running > 5, "no request of the second session ran"
    world.settle(lambda: mine.over)
    world.finish()


DECODE_EVENTS: tuple[Any, Any] = (wpb.DecodeEvent, codec.decode_event_from_pb)


def test_a_router_takes_nonsense_from_its_workers() -> None:
    """Their events may end or move a request, and nothing else."""
    rng = random.Random(13)
    dispatcher = Dispatcher(RouterConfig(backoff_most=0.1), random.Random(4), 0.0)
    now = 0.0
    for role in Role:
        dispatcher.worker_up("w:1", role, HELLO, now)
    for turn in range(15_000):
        now += 0.01
        legs = [(role, leg.key, flow) for flow in dispatcher.flows.values() for role, leg in flow.legs.items()]
        if len(dispatcher.flows) < 8 or not legs:
            dispatcher.submit(RouterRequest(tokens_of(turn), PARAMS, 20.0, b"", ()), now)
        else:
            role, key, flow = rng.choice(legs)
            prefill = role is Role.PREFILL
            to_pb: Any = codec.prefill_event_to_pb if prefill else codec.decode_event_to_pb
            said = [to_pb(event) for event in worker_events(key, len(flow.log))]
            kind, from_pb = (wpb.PrefillEvent, codec.prefill_event_from_pb) if prefill else DECODE_EVENTS
            event = understood(nonsense(rng, [message for message in said if message is not None]), kind, from_pb)
            if event is not None and not isinstance(event, m.WorkerHello):
                dispatcher.on_event("w:1", role, event, now)
        if turn % 5 == 0:
            dispatcher.tick(now)
        if turn % 50 == 0:
            dispatcher.audit()
            dispatcher.worker_up("w:1", rng.choice(list(Role)), HELLO, now)  # it may have said that it drains
    assert dispatcher.ended.total() > 100
    for request in list(dispatcher.flows):
        dispatcher.cancel(request, now)
    assert dispatcher.idle
    dispatcher.audit()


# ---- in process: the public service -------------------------------------------------------------------------------


class Handlers:
    """Stands in for a server: keeps the handlers that the service registers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.by_name = handlers


class Context:
    """One call. `code` is its status."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.header_bytes = 0
        self.written: list[Any] = []

    def time_remaining(self) -> float:
        return 0.5

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return (("x-request-id", "odd \n name"), ("traceparent", "00-nonsense"))

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, str]]) -> None:
        assert all(value.isprintable() for _, value in trailing), "gRPC would break the call"

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Sequence[tuple[str, Any]] = ()) -> None:
        self.code = code
        self.header_bytes = len(urllib.parse.quote(details)) + sum(len(value) * 4 // 3 for _, value in trailing)
        raise grpc.aio.AbortError


async def call(handler: Any, data: bytes) -> Context:
    """As grpc.aio would: every step from the bytes to the answer's bytes."""
    context = Context()
    request = handler.request_deserializer(data)
    try:
        answer = await (handler.unary_stream or handler.unary_unary)(request, context)
        for message in context.written if answer is None else [answer]:
            assert isinstance(handler.response_serializer(message), bytes)
    except grpc.aio.AbortError:
        pass
    return context


async def test_the_public_service_answers_nonsense_with_a_status(tmp_path: Path) -> None:
    rng = random.Random(14)
    directory = make_model_dir(tmp_path / "model")
    seen: set[grpc.StatusCode] = set()
    async with running_front(directory, lambda prompt, params, index: index % 200) as front:
        server = Handlers()
        border.add_to_server(lambda: front.service, server)  # type: ignore[arg-type]
        corpus = public_corpus()
        assert corpus.keys() == server.by_name.keys()
        for _ in range(80):
            batch = [(name, nonsense(rng, corpus[name])) for name in corpus for _ in range(12)]
            ended = await asyncio.gather(*(call(server.by_name[name], data) for name, data in batch))
            for (name, data), context in zip(batch, ended, strict=True):
                assert context.code not in NEVER, f"{name} {data!r}"
                assert context.header_bytes < 7500, f"{name} {data!r}: the client would refuse the status's headers"
                seen.add(context.code)
    wanted = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
    assert wanted | {grpc.StatusCode.NOT_FOUND} <= seen


@pytest.mark.parametrize("character", ["x", "\x00", "é", "🎉", "\ud800"])
async def test_a_status_of_any_text_fits_into_its_headers(character: str) -> None:
    """A template may refuse messages in the client's own words, and a worker may have many facts."""
    facts = {f"fact {number}": character * 5000 for number in range(30)}
    error = RequestError("INVALID_ARGUMENT", character * 5000, field="chat", facts=facts, retry_after=1.0)
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await abort(context, error)  # type: ignore[arg-type]
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert 2000 < context.header_bytes < 7500
