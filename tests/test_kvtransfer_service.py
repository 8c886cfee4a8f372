"""Pull over real gRPC on loopback: bytes arrive, and every way of going wrong ends the pull on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import google_crc32c
import grpc
import grpc.aio
import pytest
from kvtransfer_cores import Owner, Puller, layout
from kvtransfer_pair import KEY, PLACED, Pair, PullSide, open_plain, until

from engine.messages import BlocksSealed, Node, PairReply, PullOpen, Reason, RequestKey, Ticket, TransportOffer
from engine.types import FinishReason
from kvtransfer.ticket import layout_digest
from protos import worker_pb2, worker_pb2_grpc
from wire.channel import open_server
from wire.liveness import SILENCE_S
from wire.pairing import pair_reply_to_pb
from wire.pulling import pull_event_to_pb, pull_request_to_pb
from wire.security import Security

BLOCK_BYTES = 5 << 19  # two and a half messages


@pytest.fixture
async def pair(free_port: int) -> AsyncIterator[Pair]:
    pair = Pair(free_port, block_bytes=BLOCK_BYTES, incarnation=77)
    await pair.start_server()
    pair.peers.meet([pair.node])
    await until(lambda: len(pair.peers) == 1)
    pair.service.bytes_sent = 0
    try:
        yield pair
    finally:
        await pair.close()


async def test_every_byte_arrives_while_the_prompt_is_still_being_computed(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 22, 0.0)
    pull = pair.start(ticket, PLACED)
    pair.seal(ticket, [0, 1])
    await until(lambda: pair.clients.bytes_received == 2 * BLOCK_BYTES)
    pair.seal(ticket, [2, 3, 4, 5])
    expected = pair.expected(ticket)
    pair.finish(ticket)
    await until(lambda: pull in pair.puller.ready and not pair.owner.tables)
    assert pair.puller.data(pull) == expected
    assert [action.reason for action in pair.owner.freed] == [None]
    await until(lambda: len(pair.service) == len(pair.clients) == 0)
    assert pair.service.bytes_sent == pair.clients.bytes_received == 6 * BLOCK_BYTES


async def test_a_second_puller_gets_all_of_it_after_the_first_one_left(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pair.seal(ticket, [0, 1])
    first = pair.start(ticket, PLACED)
    await until(lambda: pair.clients.bytes_received == 2 * BLOCK_BYTES)
    pair.cancel(first)
    await until(lambda: first in pair.puller.drained and len(pair.service) == 0)
    expected = pair.expected(ticket)
    pair.finish(ticket)
    second = pair.start(ticket, RequestKey(5, 1, 2))
    await until(lambda: second in pair.puller.ready)
    assert pair.puller.data(second) == expected


async def test_a_cancelled_pull_gives_its_blocks_back_only_after_its_stream_is_over(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 40, 0.0)
    pair.seal(ticket, range(10))
    pull = pair.start(ticket, PLACED)
    await until(lambda: pair.clients.bytes_received > 0)
    pair.cancel(pull)
    assert pull not in pair.puller.drained and pair.puller.inbox.draining
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.pool.available == 16
    await until(lambda: len(pair.service) == 0)
    assert ticket.id in pair.owner.outbox


async def test_the_owner_s_end_fails_the_pull(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket, PLACED)
    await until(lambda: len(pair.service) == 1)
    pair.revoke(ticket)
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.failed[pull] is Reason.STALE_TICKET


async def test_an_owner_that_is_not_there_fails_the_pull(pair: Pair, free_ports: Callable[[int], list[int]]) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    pull = pair.start(dataclasses.replace(ticket, owner=Node("prefill-9", 77, nobody)), PLACED)
    await until(lambda: pull in pair.puller.drained)
    assert pair.puller.failed[pull] is Reason.COPY_FAILED


async def test_a_server_that_stops_fails_the_pull_at_once(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket, PLACED)
    await until(lambda: len(pair.service) == 1)
    began = time.monotonic()
    await pair.server.stop(None)
    await until(lambda: pull in pair.puller.drained)
    assert time.monotonic() - began < SILENCE_S, "not by its silence"
    assert len(pair.service) == 0


async def test_token_0_that_ends_the_request_needs_no_blocks(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pair.puller.bind_at_once = False
    pull = pair.start(ticket, PLACED)
    pair.finish(ticket, FinishReason.STOP)
    await until(lambda: pull in pair.puller.drained and not pair.owner.tables)
    assert pair.puller.ready[pull].first_token.finish_reason is FinishReason.STOP
    assert pair.clients.bytes_received == 0


async def test_quiet_streams_stay_open(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket, PLACED)
    await asyncio.sleep(4.5)
    assert pull not in pair.puller.failed and len(pair.service) == 1
    pair.cancel(pull)


async def test_closing_the_clients_reports_every_pull_even_one_that_has_not_begun(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    old = pair.start(ticket, PLACED)
    await until(lambda: len(pair.service) == 1)
    new = pair.start(ticket, PLACED)
    await pair.clients.close()
    assert set(pair.puller.failed) == {old, new} == set(pair.puller.drained)


# ---- peers that are not ours --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def raw_call(pair: Pair) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    channel = open_plain(pair.owner.node.address)
    call = worker_pb2_grpc.KvTransferServiceStub(channel).Pull()
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


def opening(ticket: Ticket) -> worker_pb2.PullRequest:
    return pull_request_to_pb(PullOpen(ticket.id, PLACED, 77, "grpc", layout_digest(layout(BLOCK_BYTES))))


async def test_a_silent_puller_loses_its_stream_after_three_seconds(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    async with raw_call(pair) as call:
        await call.write(opening(ticket))
        await until(lambda: len(pair.service) == 1)
        began = time.monotonic()
        await until(lambda: len(pair.service) == 0)
        assert time.monotonic() - began > 2.5
    assert ticket.id in pair.owner.outbox


async def test_a_puller_that_does_not_read_holds_up_a_bounded_number_of_bytes(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 64, 0.0)
    pair.seal(ticket, range(16))
    async with raw_call(pair) as call:
        await want_everything(call, ticket, seconds=1.5)
        sent = pair.service.bytes_sent
        assert sent < 12 << 20
        pair.revoke(ticket)
        while await call.read() is not grpc.aio.EOF:
            pass
        assert pair.service.bytes_sent == sent, "no byte of a block that may have a new tenant"
        await until(lambda: len(pair.service) == 0)


async def test_a_puller_that_never_reads_the_end_loses_its_stream_although_it_heartbeats(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 64, 0.0)
    pair.seal(ticket, range(16))
    async with raw_call(pair) as call:
        await want_everything(call, ticket, seconds=0.5)
        pair.revoke(ticket)
        async with asyncio.timeout(30):
            while len(pair.service):
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
                    await call.write(worker_pb2.PullRequest(heartbeat=worker_pb2.Heartbeat(sequence=1)))
                await asyncio.sleep(0.25)


async def want_everything(call: grpc.aio.StreamStreamCall, ticket: Ticket, seconds: float) -> None:
    """Asks for every block and reads nothing."""
    await call.write(opening(ticket))
    await call.write(worker_pb2.PullRequest(want=worker_pb2.PullWant(positions=range(ticket.num_blocks))))
    await asyncio.sleep(seconds)


async def test_a_request_without_content_ends_its_own_stream_and_no_other(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    pull = pair.start(ticket, PLACED)
    await until(lambda: len(pair.service) == 1)
    for nonsense in (worker_pb2.PullRequest(), worker_pb2.PullRequest(done=worker_pb2.PullDone())):
        async with raw_call(pair) as call:
            await call.write(nonsense)
            with contextlib.suppress(grpc.aio.AioRpcError):  # its status, where the stream ends with one
                while await call.read() is not grpc.aio.EOF:
                    pass
    await until(lambda: len(pair.service) == 1)
    assert pull not in pair.puller.failed


Lies = Callable[[bytes], list[worker_pb2.BlockData | None]]


class Liar(worker_pb2_grpc.KvTransferServiceServicer):
    """An owner that announces a block and sends something else."""

    def __init__(self, owner: Owner, lies: Lies) -> None:
        self.owner = owner
        self.lies = lies

    async def Pair(self, request: worker_pb2.PairRequest, context: object) -> worker_pb2.PairReply:
        return pair_reply_to_pb(PairReply(self.owner.node, self.owner.cache.layout, [TransportOffer("grpc")]))

    async def Pull(self, request_iterator: AsyncIterator[object], context: grpc.aio.ServicerContext) -> None:
        handle = self.owner.handles[0]
        async for request in request_iterator:
            if request.WhichOneof("request") == "open":
                await context.write(pull_event_to_pb(BlocksSealed([handle])))
            if request.WhichOneof("request") == "want":
                for data in self.lies(bytes(self.owner.cache.block_bytes(handle.id))):
                    await context.write(worker_pb2.PullEvent(data=data))


async def test_a_silent_owner_loses_its_pull_after_three_seconds(free_port: int) -> None:
    owner = Owner(16, 32, Node("prefill-0", 77, f"127.0.0.1:{free_port}"))
    ticket = owner.accept(KEY, 8, 0.0)
    owner.seal(ticket.id, [0], 0.0)
    near = PullSide(Puller(16, 32))
    async with liar(owner, free_port, lambda block: []):
        pull = near.start(ticket, PLACED)
        began = time.monotonic()
        await until(lambda: pull in near.puller.drained)
        assert time.monotonic() - began > 2.5
        assert near.puller.failed[pull] is Reason.COPY_FAILED
        await near.close_clients()


@contextlib.asynccontextmanager
async def liar(owner: Owner, port: int, lies: Lies) -> AsyncIterator[None]:
    server = open_server(Security(), internal=True)
    worker_pb2_grpc.add_KvTransferServiceServicer_to_server(Liar(owner, lies), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def _data(position: int, offset: int, chunk: bytes, flip: int = 0) -> worker_pb2.BlockData:
    crc = google_crc32c.value(chunk) ^ flip
    return worker_pb2.BlockData(position=position, offset=offset, data=chunk, crc32c=crc)


LIES: dict[str, Lies] = {
    "wrong checksum": lambda block: [_data(0, 0, block, flip=1)],
    "wrong bytes under a right checksum": lambda block: [_data(0, 0, bytes(len(block)))],
    "position out of range": lambda block: [_data(2**31, 0, block)],
    "position not asked for": lambda block: [_data(1, 0, block)],
    "offset beyond the block": lambda block: [_data(0, len(block), block)],
    "huge offset": lambda block: [_data(0, 2**63, block)],
    "more bytes than a block": lambda block: [_data(0, 0, block + b"x")],
    "a gap": lambda block: [_data(0, 0, block[:8]), _data(0, 16, block[16:])],
    "an overlap": lambda block: [_data(0, 0, block[:8]), _data(0, 4, block[4:])],
    "no bytes": lambda block: [_data(0, 0, b"")],
    "the same block twice": lambda block: [_data(0, 0, block), _data(0, 0, block)],
    "an event without content": lambda block: [None],
}


@pytest.mark.parametrize("lie", LIES)
async def test_bytes_that_are_not_what_was_announced_fail_the_pull(lie: str, free_port: int) -> None:
    owner = Owner(16, 32, Node("prefill-0", 77, f"127.0.0.1:{free_port}"))
    ticket = owner.accept(KEY, 8, 0.0)
    owner.seal(ticket.id, [0], 0.0)
    near = PullSide(Puller(16, 32), digests=lie != "wrong checksum")  # which counts where digests do not
    async with liar(owner, free_port, LIES[lie]):
        pull = near.start(ticket, PLACED)
        await until(lambda: pull in near.puller.drained and len(near.clients) == 0)
        assert "owner silent" not in near.peers.paths()[0].failures
        assert near.puller.failed[pull] is Reason.COPY_FAILED
        assert near.puller.pool.available == 16
        await near.close_clients()


async def test_bytes_of_an_owner_that_are_no_message_fail_the_pull(free_port: int) -> None:
    async def answer(requests: object, context: object) -> AsyncIterator[bytes]:
        yield b"\xff\xff"
        await asyncio.sleep(60)

    server = open_server(Security(), internal=True)

    async def pair(request: bytes, context: object) -> bytes:
        reply = PairReply(Node("n", 1, ""), layout(BLOCK_BYTES), [TransportOffer("grpc")])
        return pair_reply_to_pb(reply).SerializeToString()

    handlers = {
        "Pair": grpc.unary_unary_rpc_method_handler(pair),
        "Pull": grpc.stream_stream_rpc_method_handler(answer),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("pagewire.v1.KvTransferService", handlers)])
    server.add_insecure_port(f"127.0.0.1:{free_port}")
    await server.start()
    side = PullSide(Puller(16, BLOCK_BYTES))
    try:
        pull = side.start(Ticket(9, Node("n", 1, f"127.0.0.1:{free_port}"), 8, 2, 60.0), PLACED)
        await until(lambda: side.puller.failed.get(pull) is Reason.COPY_FAILED and pull in side.puller.drained)
    finally:
        await side.close_clients()
        await server.stop(None)


async def test_a_channel_that_cannot_be_opened_fails_the_pull() -> None:
    def broken(address: str) -> grpc.aio.Channel:
        raise FileNotFoundError("cert.pem")

    side = PullSide(Puller(16, BLOCK_BYTES), connect=broken)
    pull = side.start(Ticket(9, Node("n", 1, "127.0.0.1:1"), 8, 2, 60.0), PLACED)
    await until(lambda: side.puller.failed.get(pull) is Reason.COPY_FAILED and pull in side.puller.drained)
    assert len(side.clients) == 0
    await side.close_clients()


async def test_nonsense_of_a_puller_ends_its_stream_with_a_sentence(pair: Pair) -> None:
    ticket = pair.owner.accept(KEY, 8, 0.0)
    opening = pull_request_to_pb(PullOpen(ticket.id, PLACED, 77, "grpc", layout_digest(layout(BLOCK_BYTES))))
    channel = open_plain(ticket.owner.address)
    for nonsense in (b"\xff\xff", b""):
        said = iter([opening.SerializeToString(), nonsense])
        with pytest.raises(grpc.aio.AioRpcError, match="nonsense") as refused:
            async for _ in channel.stream_stream("/pagewire.v1.KvTransferService/Pull")(said):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await channel.close()
    assert ticket.id in pair.owner.outbox, "the ticket is still good for another"
    pair.revoke(ticket)
