"""Nonsense on the wire, against every RPC of real processes: a status for its sender, and nothing for anybody else.

A status is never UNKNOWN or INTERNAL, no process dies, no log has a traceback, what others run goes on, and every
block comes back. A peer that answers nonsense is played by a server in this process.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import Cluster
from google.protobuf.message import DecodeError, Message
from kill_workers import Stream, all_idle, request_for
from mutations import PARAMS, decode_commands, nonsense, prefill_commands, public_corpus, pull_requests, tokens_of
from test_decode_service_servicer import Link

from engine import messages as m
from kvtransfer.ticket import layout_digest
from prefill_service.config import ROLE as PREFILL
from protos import worker_pb2 as wpb
from wire import codec
from wire.channel import open_channel
from wire.security import Security

NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
PACKAGE = "/pagewire.v1."


@pytest.fixture
async def channels(cluster: Cluster) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """To every process, by name. Afterwards nothing is left behind in any of them."""
    opened = {
        name: open_channel(program.address, Security(), internal=False) for name, program in cluster.programs.items()
    }
    yield opened
    for channel in opened.values():
        await channel.close()
    assert await all_idle(cluster) == ""
    for name in cluster.programs:
        assert cluster.alive(name), cluster.log(name)
        assert cluster.tracebacks(name) == []


async def many(work: Iterable[Awaitable[None]], at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(each: Awaitable[None]) -> None:
        async with gate:
            await each

    await asyncio.gather(*map(one, work))


def drains(data: bytes, kind: type[Message]) -> bool:
    """A worker that is told to drain obeys, and the cluster is shared."""
    try:
        return kind.FromString(data).WhichOneof("command") == "drain"
    except DecodeError:
        return False


async def talk(channel: grpc.aio.Channel, method: str, messages: list[bytes], linger: float) -> grpc.StatusCode:
    """One stream that says all of this, listens for `linger` seconds, and ends."""

    async def say() -> AsyncIterator[bytes]:
        for data in messages:
            yield data
        await asyncio.sleep(linger)

    stream: Any = channel.stream_stream(PACKAGE + method)(say(), timeout=5.0)
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        # grpc.aio's client invents a status where the stream ended under its own write.
        return grpc.StatusCode.CANCELLED if error.details() == "Internal error from Core" else error.code()
    finally:
        stream.cancel()
    return grpc.StatusCode.OK


async def undisturbed(channel: grpc.aio.Channel, work: Awaitable[None]) -> None:
    """`work` runs beside a client that gets its answers, each the same as alone."""
    request = request_for(3, 40, 60, 250)
    alone = await Stream(channel, request).whole()
    working = asyncio.ensure_future(work)
    while not working.done():
        assert await Stream(channel, request).whole() == alone
        await asyncio.wait([working], timeout=0.2)
    await working


async def test_every_method_of_the_public_service(channels: dict[str, grpc.aio.Channel]) -> None:
    rng, codes, corpus = random.Random(21), Counter[grpc.StatusCode](), public_corpus()
    channel = channels["router"]

    async def one(name: str, data: bytes) -> None:
        kind = channel.unary_stream if name == "GenerateStream" else channel.unary_unary
        call: Any = kind(PACKAGE + "GenerationService/" + name)(data, timeout=2.0)
        try:
            if name == "GenerateStream":
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            assert error.code() not in NEVER, f"{name} {data!r}: {error.details()}"
        codes[await call.code()] += 1

    work = [one(name, nonsense(rng, corpus[name])) for _ in range(500) for name in corpus]
    await undisturbed(channel, many(work, 24))
    assert codes[grpc.StatusCode.OK] > 200 and codes[grpc.StatusCode.INVALID_ARGUMENT] > 200, codes


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_attach(role: str, channels: dict[str, grpc.aio.Channel]) -> None:
    rng, codes = random.Random(22), Counter[grpc.StatusCode]()
    kind: type[Message] = wpb.PrefillCommand if role == "prefill" else wpb.DecodeCommand
    owner = m.Node("nobody", 3, "127.0.0.1:9")

    async def one(number: int) -> None:
        ticket = m.Ticket(number + 1, owner, 10, 1, 60.0)
        corpus = prefill_commands(number) if role == "prefill" else decode_commands(number, ticket)
        hello = codec.prefill_command_to_pb(m.RouterHello(f"fuzz-{number}", secrets.randbits(64), 1))
        said = [nonsense(rng, corpus) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.9:
            said.insert(0, hello.SerializeToString())
        said = [data for data in said if not drains(data, kind)]
        code = await talk(channels[role + "-1"], f"{role.capitalize()}Service/Attach", said, rng.choice((0.0, 0.2)))
        assert code not in NEVER, said
        codes[code] += 1

    await undisturbed(channels["router"], many((one(number) for number in range(400)), 16))
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 50, codes


async def test_pull(channels: dict[str, grpc.aio.Channel]) -> None:
    """Two tickets: nonsense is talked about the first one, the second is pulled as ever afterwards."""
    rng, codes = random.Random(23), Counter[grpc.StatusCode]()
    link = Link(PREFILL, channels["prefill-1"])
    try:
        tickets = {}
        for request in (1, 2):
            link.outbound.put(m.PrefillStart(m.RequestKey(request, 1), tokens_of(request, 40), 0, PARAMS, 60.0, 0.0))
        async with asyncio.timeout(10):
            while len(tickets) < 2 or not (link.of(m.FirstToken, 1) and link.of(m.FirstToken, 2)):
                tickets = {r: a.ticket for r in (1, 2) for a in link.of(m.PrefillAccepted, r)}
                await asyncio.sleep(0.01)
        assert link.hello is not None
        digest = layout_digest(link.hello.layout)

        async def one(number: int) -> None:
            corpus = pull_requests(tickets[1], m.RequestKey(1, 1, number), digest)
            said = [nonsense(rng, corpus) for _ in range(rng.randint(1, 8))]
            if rng.random() < 0.5:
                said.insert(0, corpus[rng.choice((0, 2))].SerializeToString())
            code = await talk(channels["prefill-1"], "KvTransferService/Pull", said, rng.choice((0.0, 0.2)))
            assert code not in NEVER, said
            codes[code] += 1

        await undisturbed(channels["router"], many((one(number) for number in range(500)), 16))
        opening, _, _, want, *_ = pull_requests(tickets[2], m.RequestKey(2, 1, 1), digest)
        stream: Any = channels["prefill-1"].stream_stream(PACKAGE + "KvTransferService/Pull")(timeout=5.0)
        await stream.write(opening.SerializeToString())
        await stream.write(want.SerializeToString())
        kinds: Counter[str | None] = Counter()
        while kinds["data"] < 3:
            kinds[wpb.PullEvent.FromString(await stream.read()).WhichOneof("event")] += 1
        assert kinds["sealed"] and kinds["first_token"] and not kinds["failed"], kinds
        stream.cancel()
    finally:
        await link.end()
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 50, codes
