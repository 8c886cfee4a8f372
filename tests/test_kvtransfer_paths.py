"""Between two workers the best path that proves itself carries every block; each refusal has a name and hurts one pull.

Over real sockets and streams, for each path that this machine has. nixl is an extra: where it is not installed its
cases are skipped, and say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from kvtransfer_cores import SPARE, Puller, layout
from kvtransfer_pair import KEY, PLACED, Pair, PullSide, open_plain, until
from many_transfers import transfer

from engine.messages import BlockHandle, Node, PairReply, PullOpen, Reason, RequestKey, Ticket
from kvtransfer.paths import CopyFailed, NoPath, Route
from kvtransfer.peers import MAX_PEERS
from kvtransfer.ticket import layout_digest
from kvtransfer.transports import nixl
from protos import worker_pb2, worker_pb2_grpc
from wire.pulling import pull_request_to_pb


def _missing() -> str:
    try:
        nixl.available()
    except NoPath as refusal:
        return str(refusal)
    return ""


NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(_missing()), reason=f"nixl: {_missing()}"))
EVERY = pytest.mark.parametrize("kind", ["memfd", NIXL, "grpc"])
ONE_SIDED = pytest.mark.parametrize("kind", ["memfd", NIXL])


@contextlib.asynccontextmanager
async def pair_of(port: int, kind: str, **more: Any) -> AsyncIterator[Pair]:
    """Owner and puller that have met by this path."""
    pair = Pair(port, kinds=[] if kind == "grpc" else [kind], **more)
    await pair.start_server()
    try:
        await pair.peers.reach(pair.node)
        assert pair.route == kind, pair.peers.paths()
        yield pair
    finally:
        await pair.close()


# ---- which path, and how it is found ------------------------------------------------------------------------------


@EVERY
async def test_a_pair_is_warm_before_its_first_request_and_tells_what_it_measured(kind: str, free_port: int) -> None:
    pair = Pair(free_port, kinds=[] if kind == "grpc" else [kind])
    await pair.start_server()
    try:
        pair.peers.meet([pair.node])
        await until(lambda: len(pair.peers) == 1)
        (path,) = pair.peers.paths()
        assert path.transport == kind and path.bytes_per_second > 0 and path.fallback == ""
        assert path.warm_seconds > 0
        assert pair.said == [str(path)] and f"by {kind}, " in pair.said[0] and " GB/s, warm in " in pair.said[0]
        pair.peers.meet([pair.node])
        ticket = pair.owner.accept(KEY, 22, 0.0)
        pull = pair.start(ticket)
        expected = pair.compute(ticket)
        await until(lambda: pull in pair.puller.ready)
        assert pair.puller.data(pull) == expected
        await pair.over()
        (path,) = pair.peers.paths()
        assert pair.service.paired == 1, "descriptors are exchanged once"
        assert (path.transfers, path.bytes, path.failures) == (1, 6 * (1 << 16), {})
    finally:
        await pair.close()


@pytest.mark.skipif(bool(_missing()), reason=f"nixl: {_missing()}")
async def test_the_best_path_that_both_offer_is_taken(free_port: int) -> None:
    async with pair_of(free_port, "memfd") as pair:
        assert pair.peers.paths()[0].fallback == ""
    both = Pair(free_port, kinds=["memfd", "nixl"])
    await both.start_server()
    try:
        await both.exports[0].close()  # another host, as memfd sees it
        assert (await both.peers.reach(both.node)).transport == "nixl"
        assert both.peers.paths()[0].fallback == "memfd: not offered on this host"
    finally:
        await both.close()


@ONE_SIDED
async def test_a_path_that_does_not_carry_the_probe_intact_is_not_used(
    kind: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(free_port, kinds=[kind])
    await pair.start_server()
    pair.owner.cache.block_bytes(16)[5] ^= 1  # the first probe block is not what its digest says
    try:
        with pytest.raises(NoPath, match="copy_failed"):
            await pair.peers.reach(pair.node)
        assert pair.peers.paths()[0].transport == ""
        assert f"{kind}: its probe failed" in pair.peers.refuses()
    finally:
        await pair.close()


@EVERY
async def test_a_path_below_the_floor_is_not_used_and_both_numbers_are_named(kind: str, free_port: int) -> None:
    pair = Pair(free_port, kinds=[] if kind == "grpc" else [kind], floor=5e12)
    await pair.start_server()
    try:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.failed[pull] is Reason.COPY_FAILED
        cause = pair.puller.causes[pull]
        assert " GB/s, and --min-transfer-gbps asks for 5000" in cause and f"{kind}: " in cause
        assert pair.peers.refuses().startswith(f"can pull KV blocks from no prefill worker: {pair.node.address} (")
        assert ticket.id in pair.owner.outbox, "another decode worker may take it"
        pair.revoke(ticket)
    finally:
        await pair.close()


async def test_an_owner_that_has_a_path_again_is_asked_again(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.peers.RETRY_S", 0.2)
    pair = Pair(free_port, kinds=["memfd"], only="memfd")
    await pair.server.start()  # its memory is not served yet
    try:
        pair.peers.meet([pair.node])
        await until(lambda: pair.peers.refuses() != "")
        pair.exports[0].start()
        await until(lambda: pair.peers.refuses() == "")
        assert pair.route == "memfd"
    finally:
        await pair.close()


async def test_an_owner_that_does_not_answer_for_a_while_is_still_asked_again(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that refuses work is sent none, so nothing but this would ever ask."""
    monkeypatch.setattr("kvtransfer.peers.RETRY_S", 0.05)
    pair = Pair(free_port, kinds=["memfd"], only="memfd")
    await pair.server.start()  # its memory is not served yet
    ask, asked = pair.peers._ask, 0

    async def sometimes(owner: Node, kind: str) -> PairReply:
        nonlocal asked
        asked += 1
        if asked in (2, 3):
            raise NoPath("DEADLINE_EXCEEDED: it is busy")
        return await ask(owner, kind)

    monkeypatch.setattr(pair.peers, "_ask", sometimes)
    try:
        pair.peers.meet([pair.node])
        await until(lambda: pair.peers.refuses() != "")
        pair.exports[0].start()
        await until(lambda: pair.peers.refuses() == "")
        assert pair.route == "memfd" and asked >= 4
        await until(lambda: not pair.peers._asking_again)
    finally:
        await pair.close()


async def test_an_owner_without_a_path_whose_process_ended_is_forgotten(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.peers.RETRY_S", 0.05)
    pair = Pair(free_port, kinds=["memfd"], only="memfd")
    await pair.server.start()  # its memory is not served
    try:
        pair.peers.meet([pair.node])
        await until(lambda: pair.peers.refuses() != "")
        pair.service._node = pair.node._replace(incarnation=pair.node.incarnation ^ 1)
        await until(lambda: pair.peers.refuses() == "")
        assert len(pair.peers) == 0
        await until(lambda: not pair.peers._asking_again)
    finally:
        await pair.close()


async def test_a_process_that_ended_while_it_was_tried_does_not_take_the_place_of_the_next(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(free_port)
    old, new, last_probe = pair.node._replace(incarnation=1), pair.node._replace(incarnation=2), asyncio.Event()

    async def choose(owner: Node) -> Route:
        if owner == old:  # it answers, and its last probe takes longer than its life
            await last_probe.wait()
        return Route("grpc", None, answered_at=owner.incarnation)

    monkeypatch.setattr(pair.peers, "_choose", choose)
    try:
        pair.peers.meet([old, new])
        await until(lambda: pair.peers.route_of(new) is not None)
        last_probe.set()
        await until(lambda: not pair.peers._meeting)
        assert pair.peers.route_of(new) is not None and pair.peers.route_of(old) is None
    finally:
        await pair.close()


async def test_a_router_that_names_thousands_of_owners_begins_no_more_pairs_than_are_kept(free_port: int) -> None:
    pair = Pair(free_port)
    try:
        pair.peers.meet([Node("", number, f"127.0.0.1:{number}") for number in range(1, 3000)])
        assert len(pair.peers._meeting) == MAX_PEERS
    finally:
        await pair.close()


async def test_an_owner_that_names_millions_of_probe_blocks_is_refused_with_both_numbers(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(free_port)
    await pair.start_server()
    ask = pair.peers._ask

    async def boasting(owner: Node, kind: str) -> PairReply:
        return dataclasses.replace(await ask(owner, kind), probe_blocks=2**32 - 1)

    monkeypatch.setattr(pair.peers, "_ask", boasting)
    try:
        with pytest.raises(NoPath, match="names 4294967295 blocks for a probe, and 256 are the most"):
            await pair.peers.reach(pair.node)
    finally:
        await pair.close()


@EVERY
async def test_workers_of_another_layout_are_refused_field_by_field(kind: str, free_port: int) -> None:
    kinds = [] if kind == "grpc" else [kind]
    pair = Pair(free_port, kinds=kinds)
    await pair.start_server()
    other = Puller(16, 1 << 16)
    other.cache.layout = layout(1 << 16)._replace(dtype="bfloat16", num_layers=7)
    side = PullSide(other, [pair.import_(each, other) for each in kinds])
    try:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = side.start(ticket)
        await until(lambda: pull in other.drained)
        assert other.causes[pull] == "dtype is bfloat16 here and fake there; num_layers is 7 here and 1 there"
        assert pair.service.refused == {"another layout": 1}
        good = pair.start(ticket, RequestKey(5, 1, 2))
        pair.compute(ticket)
        await until(lambda: good in pair.puller.ready)
    finally:
        await side.close_clients()
        await pair.close()


async def test_a_pair_call_of_nonsense_is_refused_with_a_sentence_and_hurts_nobody(free_port: int) -> None:
    async with pair_of(free_port, "grpc") as pair:
        rng, channel = random.Random(5), open_plain(pair.node.address)
        call = channel.unary_unary("/pagewire.v1.KvTransferService/Pair")
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="no PairRequest") as refused:
                await call(b"\xff\xff")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for _ in range(200):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(rng.randbytes(rng.randint(0, 60)))
                assert refused.value.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION,
                )  # fmt: skip
        finally:
            await channel.close()
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket)
        pair.compute(ticket)
        await until(lambda: pull in pair.puller.ready)


async def test_another_process_at_the_owner_s_address_is_not_taken_for_it(free_port: int) -> None:
    pair = Pair(free_port)
    await pair.start_server()
    try:
        with pytest.raises(NoPath, match="another process answers at this address now"):
            await pair.peers.reach(pair.node._replace(incarnation=5))
        assert pair.service.refused == {"another incarnation": 1}
        assert (await pair.peers.reach(pair.node)).transport == "grpc"
    finally:
        await pair.close()


# ---- what travels -------------------------------------------------------------------------------------------------


@ONE_SIDED
async def test_a_prompt_of_4096_tokens_takes_at_most_its_blocks_and_two_operations(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind, num_blocks=256, block_bytes=1 << 12) as pair:
        route = await pair.peers.reach(pair.node)
        assert route.source is not None
        before = route.source.operations
        said: list[str] = []
        carry = pair.clients.carry

        def counted(action: Any) -> None:
            said.append(type(getattr(action, "message", action)).__name__)
            carry(action)

        pair.clients.carry = counted  # type: ignore[method-assign]
        ticket = pair.owner.accept(KEY, 1024, 0.0)  # 256 blocks
        pull = pair.start(ticket)
        pair.compute(ticket)
        await until(lambda: pull in pair.puller.ready)
        messages = [name for name in said if name.startswith("Pull")]
        assert messages == ["PullOpen", "PullCopied", "PullDone"], "per request only ids, generations and positions"
        assert route.source.operations - before <= 256 + 2


@EVERY
async def test_chunks_are_pulled_while_later_chunks_are_computed(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        ticket = pair.owner.accept(KEY, 22, 0.0)
        pull = pair.start(ticket)
        for chunk in ([0, 1], [2, 3], [4, 5]):
            pair.seal(ticket, chunk)
            want = len(pair.puller.bound[pull]) + 2
            await until(lambda want=want: len(pair.puller.landed.get(pull, ())) == want)  # type: ignore[misc]
            assert pull not in pair.puller.ready
        expected = pair.expected(ticket)
        pair.finish(ticket)
        await until(lambda: pull in pair.puller.ready)
        assert pair.puller.data(pull) == expected


# ---- what goes wrong ----------------------------------------------------------------------------------------------


@EVERY
async def test_a_ticket_that_is_gone_is_refused_and_the_owner_s_others_are_untouched(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        other = pair.owner.accept(RequestKey(9, 1), 8, 0.0)
        good = pair.start(other, RequestKey(9, 1, 1))
        used = pair.owner.accept(KEY, 8, 0.0)
        first = pair.start(used)
        pair.compute(used)
        await until(lambda: first in pair.puller.ready)
        expired = pair.owner.accept(RequestKey(6, 1), 8, 0.0, deadline_at=1.0)
        pair.at_owner(pair.owner.tick(2.0))
        unknown = dataclasses.replace(used, id=12345)
        pulls = {
            "used": pair.start(used, PLACED),
            "expired": pair.start(expired, RequestKey(6, 1, 1)),
            "unknown": pair.start(unknown, PLACED),
        }
        await until(lambda: all(pull in pair.puller.drained for pull in pulls.values()))
        assert {pair.puller.failed[pull] for pull in pulls.values()} == {Reason.STALE_TICKET}
        assert pair.owner.outbox.refused[Reason.STALE_TICKET] == 3
        expected = pair.compute(other)
        await until(lambda: good in pair.puller.ready)
        assert pair.puller.data(good) == expected
        await pair.over()
        assert pair.peers.paths()[0].failures == {"stale_ticket": 3}


async def test_a_pull_from_the_puller_s_own_process_fails_by_name_whoever_answers_as_it(
    free_port: int,
) -> None:
    """Only a process with both stages lends blocks to itself, and there such a pull does not reach the network."""
    async with pair_of(free_port, "memfd") as pair:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket, transport="local")
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.causes[pull] == "its ticket names this worker, which lends no blocks"
        assert pair.puller.inbox.failed == {Reason.COPY_FAILED: 1}
        again = pair.start(ticket, RequestKey(5, 1, 2))
        pair.compute(ticket)
        await until(lambda: again in pair.puller.ready)


@EVERY
async def test_a_ticket_of_an_earlier_incarnation_is_refused_before_and_after_its_puller_has_met_the_owner(
    kind: str, free_port: int
) -> None:
    async with pair_of(free_port, kind) as pair:
        ticket = pair.owner.accept(KEY, 8, 0.0)
        earlier = pair.node._replace(incarnation=pair.node.incarnation ^ 1)
        pull = pair.start(dataclasses.replace(ticket, owner=earlier))
        await until(lambda: pull in pair.puller.drained)
        assert "another process answers at this address now" in pair.puller.causes[pull]
        assert pair.service.refused == {"another incarnation": 1}
        digest = layout_digest(pair.owner.cache.layout)
        reply = await first_answer(pair, PullOpen(ticket.id, PLACED, earlier.incarnation, kind, digest))
        assert reply.failed.reason == worker_pb2.Reason.Value("REASON_STALE_TICKET")
        assert pair.owner.outbox.refused == {Reason.STALE_TICKET: 1}
        good = pair.start(ticket, RequestKey(5, 1, 2))
        pair.compute(ticket)
        await until(lambda: good in pair.puller.ready)


@EVERY
@pytest.mark.parametrize("positions", [[0, 2], [2**32 - 1], [0] * 50])
async def test_positions_that_a_ticket_has_not_end_their_own_pull_alone(
    kind: str, positions: list[int], free_port: int
) -> None:
    async with pair_of(free_port, kind) as pair:
        ticket, other = pair.owner.accept(KEY, 8, 0.0), pair.owner.accept(RequestKey(9, 1), 8, 0.0)
        good = pair.start(other, RequestKey(9, 1, 1))
        opening = PullOpen(ticket.id, PLACED, pair.node.incarnation, kind, layout_digest(pair.owner.cache.layout))
        want = worker_pb2.PullRequest(want=worker_pb2.PullWant(positions=positions))
        reply = await first_answer(pair, opening, want)
        assert reply.failed.reason == worker_pb2.Reason.Value("REASON_INVALID_FIELD")
        assert reply.failed.facts["num_blocks"] == "2" and pair.owner.outbox.refused == {Reason.INVALID_FIELD: 1}
        again = pair.start(ticket, RequestKey(5, 1, 2))
        for each in (ticket, other):
            pair.compute(each)
        await until(lambda: {good, again} <= pair.puller.ready.keys())


async def first_answer(pair: Pair, opening: PullOpen, *more: worker_pb2.PullRequest) -> worker_pb2.PullEvent:
    """What the owner says first, but for its greeting, on a stream of these messages."""
    channel = open_plain(pair.node.address)
    call: Any = worker_pb2_grpc.KvTransferServiceStub(channel).Pull()
    try:
        for message in (pull_request_to_pb(opening), *more):
            await call.write(message)
        while (event := await call.read()).WhichOneof("event") == "opened":
            pass
        return event
    finally:
        call.cancel()
        await channel.close()


@ONE_SIDED
async def test_a_block_beyond_the_owner_s_pool_fails_its_own_pull_alone(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        other = pair.owner.accept(RequestKey(9, 1), 8, 0.0)
        good = pair.start(other, RequestKey(9, 1, 1))
        ticket = pair.owner.accept(KEY, 8, 0.0)
        lease = pair.owner.outbox._leases[ticket.id]
        lease.sealed[0] = BlockHandle(16 + SPARE, 0, 0, 1)
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        expected = pair.compute(other)
        await until(lambda: good in pair.puller.ready)
        assert pair.puller.data(good) == expected
        await pair.over()
        assert pair.peers.paths()[0].failures == {"block out of range": 1}
        pair.revoke(ticket)


@EVERY
async def test_bytes_that_are_not_what_was_announced_fail_their_own_pull_alone(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        other = pair.owner.accept(RequestKey(9, 1), 8, 0.0)
        good = pair.start(other, RequestKey(9, 1, 1))
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pair.owner.seal(ticket.id, [0, 1], 0.0)
        pair.owner.cache.block_bytes(pair.owner.tables[ticket.id][1])[7] ^= 1
        pull = pair.start(ticket)
        await until(lambda: pull in pair.puller.drained)
        assert pair.puller.failed[pull] is Reason.COPY_FAILED
        expected = pair.compute(other)
        await until(lambda: good in pair.puller.ready)
        assert pair.puller.data(good) == expected
        await pair.over()
        assert pair.peers.paths()[0].failures == {"copy_failed": 1}
        pair.revoke(ticket)


@EVERY
async def test_a_reader_that_stops_reading_loses_its_pull_and_no_other(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        ticket, other = pair.owner.accept(KEY, 8, 0.0), pair.owner.accept(RequestKey(9, 1), 8, 0.0)
        digest = layout_digest(pair.owner.cache.layout)
        channel = open_plain(pair.node.address)
        try:
            call = worker_pb2_grpc.KvTransferServiceStub(channel).Pull()
            opening = PullOpen(ticket.id, PLACED, pair.node.incarnation, kind, digest)
            await call.write(pull_request_to_pb(opening))
            await call.write(worker_pb2.PullRequest(want=worker_pb2.PullWant(positions=[0, 1])))
            pair.compute(ticket)
            await until(lambda: len(pair.service) == 1)
            good = pair.start(other, RequestKey(9, 1, 1))
            expected = pair.compute(other)
            await until(lambda: good in pair.puller.ready)
            assert pair.puller.data(good) == expected
            await until(lambda: len(pair.service) == 0)  # 3 s of silence
            call.cancel()
        finally:
            await channel.close()
        assert ticket.id in pair.owner.outbox, "the ticket is still good for another"
        pair.revoke(ticket)


@EVERY
async def test_a_truncated_message_ends_its_own_stream_alone(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        ticket, other = pair.owner.accept(KEY, 8, 0.0), pair.owner.accept(RequestKey(9, 1), 8, 0.0)
        good = pair.start(other, RequestKey(9, 1, 1))
        opening = PullOpen(ticket.id, PLACED, pair.node.incarnation, kind, layout_digest(pair.owner.cache.layout))
        whole = pull_request_to_pb(opening).SerializeToString()
        channel = open_plain(pair.node.address)
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="nonsense") as refused:
                async for _ in channel.stream_stream("/pagewire.v1.KvTransferService/Pull")(iter([whole[:-3]])):
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        finally:
            await channel.close()
        expected = pair.compute(other)
        await until(lambda: good in pair.puller.ready)
        assert pair.puller.data(good) == expected
        pair.revoke(ticket)


@ONE_SIDED
async def test_a_copy_that_fails_is_counted_by_its_reason_and_the_path_is_proved_again(
    kind: str, free_port: int
) -> None:
    async with pair_of(free_port, kind) as pair:
        route = await pair.peers.reach(pair.node)
        assert route.source is not None

        def broken(*arguments: object) -> list[int]:
            raise CopyFailed("the cable is cut")

        route.source.copy = broken  # type: ignore[method-assign]
        ticket = pair.owner.accept(KEY, 8, 0.0)
        pull = pair.start(ticket)
        expected = pair.compute(ticket)
        await until(lambda: pull in pair.puller.drained)
        again = pair.start(ticket, RequestKey(5, 1, 2))
        await until(lambda: again in pair.puller.ready)
        assert pair.puller.data(again) == expected
        await pair.over()
        (path,) = pair.peers.paths()
        assert (path.transport, path.transfers, path.failures) == (kind, 1, {"the cable is cut": 1})


Nonsense = Callable[[bytes], bytes]
OFFERS: dict[str, Nonsense] = {
    "nothing": lambda offer: b"",
    "half of it": lambda offer: offer[: len(offer) // 2],
    "without its end": lambda offer: offer[:-1],
    "another magic": lambda offer: b"x" + offer[1:],
    "another layout": lambda offer: offer[:32] + bytes(32) + offer[64:],
    "noise": lambda offer: random.Random(1).randbytes(len(offer)),
    "a metadata of noise": lambda offer: offer[:72] + random.Random(2).randbytes(len(offer) - 72),
}


@pytest.mark.skipif(bool(_missing()), reason=f"nixl: {_missing()}")
async def test_an_offer_that_makes_no_sense_is_refused_before_it_reaches_memory(free_port: int) -> None:
    async with pair_of(free_port, "nixl") as pair:
        offer = await pair.exports[0].offer()
        for name, nonsense in OFFERS.items():
            with pytest.raises(NoPath):
                await pair.imports[0].connect(pair.node, nonsense(offer))
                raise AssertionError(name)


# ---- several consumers --------------------------------------------------------------------------------------------


@EVERY
async def test_two_consumers_pull_one_ticket_in_parallel(kind: str, free_port: int) -> None:
    async with pair_of(free_port, kind) as pair:
        ticket = pair.owner.accept(KEY, 22, 0.0, consumers=2)
        second = PullSide(Puller(16, 1 << 16), [pair.import_(kind, Puller(16, 1 << 16))] if kind == "memfd" else [])
        try:
            one = pair.start(ticket, RequestKey(5, 1, 1))
            two = second.start(ticket, RequestKey(5, 1, 2))
            pair.seal(ticket, [0, 1, 2])
            await until(
                lambda: len(pair.service) >= 2 and bool(pair.puller.bound[one]) and bool(second.puller.bound[two])
            )
            pair.seal(ticket, [3, 4, 5])
            expected = pair.expected(ticket)
            pair.finish(ticket)
            await until(lambda: one in pair.puller.ready and two in second.puller.ready)
            assert pair.puller.data(one) == second.puller.data(two) == expected
            await until(lambda: not pair.owner.tables)
        finally:
            await second.close_clients()


# ---- what is left -------------------------------------------------------------------------------------------------


@EVERY
async def test_hundreds_of_transfers_with_cancellations_leave_nothing_behind(kind: str, free_port: int) -> None:
    """`make soak` does ten thousand of each."""
    left = await transfer(400, kind, free_port)
    assert left.right + left.cancelled == 400 and left.cancelled > 20
    assert left.nothing, left


async def test_closing_while_pairs_meet_leaves_no_task_behind(free_port: int) -> None:
    pair = Pair(free_port, kinds=["memfd"])
    await pair.start_server()
    pair.peers.meet([pair.node])
    pair.start(Ticket(9, pair.node, 8, 2, 60.0))
    await asyncio.sleep(0)
    await pair.close()
    assert len(pair.peers) == 0 and len(pair.clients) == 0
