"""Sessions over a real loopback stream: order, heartbeats, and every way in which one can end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from engine import messages as m
from protos import worker_pb2_grpc
from wire import codec, session
from wire.channel import open_channel, open_server, write
from wire.liveness import SILENCE_S
from wire.ports import bind
from wire.security import Security
from wire.session import Outbound, SessionOver, attach, serve

HELLO = m.WorkerHello(m.Node("w", 7, "here:1"), m.KvLayout(b"x", "float32", 16, 1, 1, 64, 8192, "t"), 10, 4, 100)
KEY = m.RequestKey(1, 0)


class RecordingWorker:
    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.outbounds: dict[int, Outbound[Any]] = {}
        self.closed: list[int] = []

    def session_opened(self, hello: m.RouterHello, outbound: Outbound[Any]) -> None:
        self.outbounds[hello.session] = outbound

    def session_command(self, number: int, command: Any) -> None:
        self.commands.append(command)
        self.outbounds[number].put(m.Failed(KEY, m.Reason.DRAINING, True))

    def session_closed(self, number: int, outbound: Outbound[Any]) -> None:
        self.closed.append(number)

    def load(self) -> m.WorkerLoad:
        return m.WorkerLoad(free_blocks=10)


class Servicer(worker_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: RecordingWorker) -> None:
        self.worker = worker

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        served = serve(requests, context, HELLO, self.worker, codec.prefill_command_from_pb, codec.prefill_event_to_pb)
        async with contextlib.aclosing(served) as events:
            async for event in events:
                yield event


@contextlib.asynccontextmanager
async def served(worker: RecordingWorker, token: str | None = None) -> AsyncIterator[str]:
    server = open_server(Security(token=token), internal=True)
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(Servicer(worker), server)
    port = bind(server, "127.0.0.1", 0, Security())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Router:
    """One attached session and what it heard."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.outbound: Outbound[Any] = Outbound()
        self.hello: m.WorkerHello | None = None
        self.events: list[Any] = []
        self.channel = open_channel(address, Security(token=token), internal=True)

    async def run(self) -> None:
        try:
            await attach(
                worker_pb2_grpc.PrefillServiceStub(self.channel).Attach,
                m.RouterHello("r", 1, 5),
                self.outbound,
                lambda hello: setattr(self, "hello", hello),
                self.events.append,
                codec.prefill_event_from_pb,
                codec.prefill_command_to_pb,
            )
        finally:
            await self.channel.close()


async def until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_hello_then_commands_and_events_in_order() -> None:
    worker = RecordingWorker()
    async with served(worker) as address:
        router = Router(address)
        running = asyncio.create_task(router.run())
        router.outbound.put(m.Cancel(KEY))
        router.outbound.put(m.Drain(1.0))
        await until(lambda: len(worker.commands) == 2 and len(router.events) >= 3)
        assert router.hello == HELLO
        assert worker.commands == [m.Cancel(KEY), m.Drain(1.0)]
        assert any(isinstance(event, m.WorkerLoad) for event in router.events), "the load is the heartbeat"
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await until(lambda: worker.closed == [5])


async def test_a_quiet_session_stays_up() -> None:
    worker = RecordingWorker()
    async with served(worker) as address:
        running = asyncio.create_task(Router(address).run())
        await asyncio.sleep(SILENCE_S + 1.0)
        assert not running.done() and worker.closed == []
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_a_worker_that_goes_away_ends_the_session_at_once() -> None:
    worker = RecordingWorker()
    async with served(worker) as address:
        router = Router(address)
        running = asyncio.create_task(router.run())
        await until(lambda: router.hello is not None)
    with pytest.raises(SessionOver):
        async with asyncio.timeout(1.0):
            await running
    await until(lambda: worker.closed == [5])


async def test_a_silent_worker_is_given_up_after_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def mute(requests: Any, context: Any, hello: Any, *rest: Any) -> AsyncIterator[Any]:
        yield codec.prefill_event_to_pb(hello)
        await asyncio.sleep(60)

    monkeypatch.setattr("test_wire_session.serve", mute)
    async with served(RecordingWorker()) as address:
        started = asyncio.get_running_loop().time()
        with pytest.raises(SessionOver, match="silent for 3 s"):
            await Router(address).run()
        assert SILENCE_S <= asyncio.get_running_loop().time() - started < SILENCE_S + 1.5


async def test_a_silent_router_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RecordingWorker()
    monkeypatch.setattr(session, "HEARTBEAT_S", 1000.0)
    async with served(worker) as address:
        with pytest.raises(SessionOver):
            await Router(address).run()
        await until(lambda: worker.closed == [5])


async def test_a_stream_without_hello_is_refused_with_a_sentence() -> None:
    async with served(RecordingWorker()) as address:
        channel = open_channel(address, Security(), internal=True)
        call = worker_pb2_grpc.PrefillServiceStub(channel).Attach()
        await call.write(codec.prefill_command_to_pb(m.Heartbeat(1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello" in refused.value.details()
        await channel.close()


async def test_nonsense_of_a_router_ends_its_session_with_a_sentence() -> None:
    hello = codec.prefill_command_to_pb(m.RouterHello("r", 1, 5)).SerializeToString()
    worker = RecordingWorker()
    async with served(worker) as address, grpc.aio.insecure_channel(address) as channel:
        for after in ([b"\xff\xff"], [hello], [b""]):
            call = channel.stream_stream("/pagewire.v1.PrefillService/Attach")(iter([hello, *after]))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "nonsense" in refused.value.details()
        call = channel.stream_stream("/pagewire.v1.PrefillService/Attach")(iter([b"\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError, match="begins with the router's hello"):
            await call.read()
        await until(lambda: worker.closed == [5, 5, 5])
    assert worker.commands == []


async def test_nonsense_of_a_worker_ends_the_session_at_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec.wpb.PrefillEvent, "SerializeToString", lambda event: b"\xff\xff", raising=False)
    async with served(RecordingWorker()) as address:
        with pytest.raises(SessionOver, match="does not parse"):
            await Router(address).run()


async def test_a_slow_reader_cannot_make_the_queue_grow_without_bound() -> None:
    outbound: Outbound[int] = Outbound(limit=3)
    for number in range(10):
        outbound.put(number)
    assert outbound.closed
    assert [number async for number in outbound.drain()] == [0, 1, 2]


@pytest.mark.parametrize(("token", "ok"), [("s3cret", True), ("wrong", False), (None, False)])
async def test_a_deployment_token_guards_every_call(token: str | None, ok: bool) -> None:
    async with served(RecordingWorker(), token="s3cret") as address:
        if ok:
            router = Router(address, token)
            running = asyncio.create_task(router.run())
            await until(lambda: router.hello is not None)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        else:
            assert any([await says_unauthenticated(address, token) for _ in range(10)])


async def says_unauthenticated(address: str, token: str | None) -> bool:
    """Whether a refused session says so: to gRPC a write that meets the closed stream first is INTERNAL."""
    router = Router(address, token)
    with pytest.raises(SessionOver) as over:
        await router.run()
    assert router.hello is None
    unread = str(over.value) == "the worker refused the session before its reason could be read"
    assert unread or str(over.value).startswith("UNAUTHENTICATED: a valid deployment token is required")
    return not unread


async def test_a_write_to_a_peer_that_is_gone_ends_its_handler_as_a_cancel_does() -> None:
    class Broken:
        async def write(self, message: Any) -> None:
            raise grpc.aio.InternalError("a failed batch")

    with pytest.raises(asyncio.CancelledError):
        await write(Broken(), b"")  # type: ignore[arg-type]
