"""A synchronous world around one Decoder: an owner of prompts, links that deliver when told, and a router that resumes.

Nothing happens by itself: `deliver`, `advance` and `step` each do one thing, so a test chooses the order. Both
devices are FakeRunners, so a wrong, stale or missing block shows as a wrong token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_service.decoder import Decoder
from engine.batch import Batch, SampleInput
from engine.batch import Row as BatchRow
from engine.blocks import BlockPool, num_blocks_for
from engine.config import EngineConfig
from engine.fake_runner import FakeRunner, fake_tokens
from engine.messages import (
    BlockHandle,
    Cancel,
    Credit,
    DecodeStart,
    Failed,
    FirstToken,
    Node,
    PullEvent,
    Reason,
    Refused,
    RequestKey,
    RouterHello,
    StepBatch,
    Ticket,
    WorkerLoad,
)
from engine.stopping import finish_of
from engine.types import SamplingParams, Token
from kvtransfer.actions import (
    Action,
    ClosePull,
    CloseStream,
    FreeTicket,
    MeetPeers,
    OpenPull,
    SendBlock,
    ToOwner,
    ToPuller,
    ToRouter,
)
from kvtransfer.outbox import Outbox
from kvtransfer.ticket import layout_digest

SIZE = 4  # tokens per block
VOCAB = 1000
OWNER = Node("p", 7, "127.0.0.1:50061")
NODE = Node("d", 8, "127.0.0.1:50071")


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "seed": 1, "max_tokens": max_tokens, **more})


@dataclass
class Prefill:
    """A prompt at the owner: `done` of its blocks are sealed."""

    key: RequestKey
    tokens: Sequence[int]
    emitted: int
    params: SamplingParams
    blocks: list[int]
    done: int = 0
    first: FirstToken | None = None


class Owner:
    """A prefill stage with room for everything, which computes and announces a block at a time, when told."""

    def __init__(self, blocks: int = 400) -> None:
        self.runner = FakeRunner(SIZE, blocks, VOCAB)
        self.pool = BlockPool(blocks)
        self.outbox = Outbox(OWNER, layout_digest(self.runner.layout))
        self.prefills: dict[int, Prefill] = {}
        self.eos: frozenset[int] = frozenset()
        self._last_ticket = 0

    def offer(self, key: RequestKey, tokens: Sequence[int], emitted: int, how: SamplingParams, now: float) -> Ticket:
        self._last_ticket += 1
        count = num_blocks_for(len(tokens), SIZE)
        ticket = Ticket(self._last_ticket, OWNER, len(tokens), count, 60.0)
        blocks = self.pool.take(count)
        generations = [self.pool.generation(block) for block in blocks]
        self.outbox.offer(ticket, key, 1, now + 1e9, blocks, generations, now)
        self.prefills[ticket.id] = Prefill(key, tokens, emitted, how, blocks)
        return ticket

    def advance(self, ticket_id: int, now: float) -> list[Action]:
        """Seals the next block, and samples token 0 with the last."""
        job = self.prefills[ticket_id]
        if job.done == len(job.blocks):
            return []
        start = job.done * SIZE
        chunk = job.tokens[start : start + SIZE]
        row = BatchRow(0, chunk, start, job.blocks)
        job.done += 1
        last = job.done == len(job.blocks)
        if last:
            split = len(job.tokens) - job.emitted
            row.sample = SampleInput(job.params, job.emitted, job.tokens[:split], job.tokens[split:], self.eos)
        output = self.runner.step(Batch([row], zero_blocks=[job.blocks[job.done - 1]]))
        block, position = job.blocks[job.done - 1], job.done - 1
        digest = self.runner.cache.digest(block, position, chunk)
        handle = BlockHandle(block, self.pool.generation(block), position, digest)
        actions = self.outbox.sealed(ticket_id, [handle], now)
        if last:
            (token,) = output.tokens
            assert token is not None
            reason, stop = finish_of(token.token_id, token.index, job.params, self.eos)
            job.first = FirstToken(job.key, token, reason, stop)
            actions += self.outbox.first_token(ticket_id, job.first, now)
        return actions

    def free(self, ticket_id: int) -> None:
        self.pool.give(self.prefills.pop(ticket_id).blocks)


@dataclass
class Link:
    """One pull's stream. `hung`: nothing arrives any more, not even the end."""

    ticket: int
    to_owner: deque[object] = field(default_factory=deque)
    to_puller: deque[object] = field(default_factory=deque)
    closing: bool = False
    hung: bool = False

    def ready(self) -> bool:
        return bool(self.to_owner) or (not self.hung and bool(self.to_puller or self.closing))


@dataclass
class Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    submitted: float
    log: list[int] = field(default_factory=list)
    attempt: int = 0
    key: RequestKey = RequestKey(0, 0)
    ticket: int = 0
    until: int = 1 << 30
    over: bool = False
    retry: bool = False  # refused, to be started again
    reasons: list[Reason] = field(default_factory=list)


class World:
    def __init__(
        self, blocks: int, *, max_num_seqs: int = 8, headroom: int = 2, max_waiting: int = 64, eos: Sequence[int] = ()
    ) -> None:
        self.runner = FakeRunner(SIZE, blocks, VOCAB)
        self.pool = BlockPool(blocks)
        self.owner = Owner()
        self.owner.eos = frozenset(eos)
        config = EngineConfig(num_blocks=blocks, max_num_seqs=max_num_seqs)
        self.core = Decoder(
            NODE, self.runner.layout, config, self.pool,
            vocab_size=VOCAB, eos_token_ids=eos, headroom=headroom, max_waiting=max_waiting,
        )  # fmt: skip
        self.now = 100.0
        self.links: dict[int, Link] = {}
        self.requests: dict[int, Request] = {}
        self.events: list[object] = []  # all that the router heard, but loads
        self.batch: Batch | None = None
        self.steps = 0
        self.changes = 0  # calls into the core that may have changed something
        self.apply(self.core.attach(1, RouterHello("r", 5, 1), self.now))

    # ---- the router ---------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], max_tokens: int, *, until: int = 1 << 30, **more: Any) -> Request:
        number = len(self.requests) + 1
        request = Request(number, list(prompt), params(max_tokens, **more), self.now, until=until)
        self.requests[number] = request
        self.start(request)
        return request

    def start(self, request: Request) -> None:
        """A new attempt: a prefill of prompt and log and a DecodeStart, unless the prefill's token is the last."""
        request.attempt += 1
        request.retry = False
        request.key = RequestKey(request.id, request.attempt, 1)
        tokens = request.prompt + request.log
        prefill_key = request.key._replace(placement=0)
        ticket = self.owner.offer(prefill_key, tokens, len(request.log), request.params, self.now)
        request.ticket = ticket.id
        if len(request.log) + 1 < (request.params.max_tokens or 0):
            self.command(self.decode_start(request, ticket))
            return
        while (first := self.owner.prefills[ticket.id].first) is None:
            self.advance(ticket.id)
        request.log.append(first.token.token_id)
        request.over = True
        self.apply(self.owner.outbox.revoke(ticket.id, self.now))

    def decode_start(self, request: Request, ticket: Ticket) -> DecodeStart:
        return DecodeStart(
            key=request.key,
            ticket=ticket,
            token_ids=request.prompt + request.log,
            emitted=len(request.log),
            params=request.params,
            deadline=1e6,
            age=self.now - request.submitted,
            until_index=request.until,
        )

    def command(self, command: Any) -> None:
        self.apply(self.core.on_command(1, command, self.now))

    def cancel(self, request: Request) -> None:
        request.over = True
        self.command(Cancel(request.key))
        self.apply(self.owner.outbox.revoke(request.ticket, self.now))

    def credit(self, request: Request, until: int) -> None:
        request.until = max(request.until, until)
        self.command(Credit(request.key, request.until))

    def on_event(self, event: object) -> None:
        if isinstance(event, WorkerLoad):
            return
        self.events.append(event)
        match event:
            case FirstToken():
                self._accept(event.key, event.token)
                if event.finish_reason is not None:
                    self._finish(event.key)
            case StepBatch():
                for key, token in event.rows:
                    request = self._current(key)
                    assert request is None or token.index < request.until, f"{key}: {token} without credit"
                    self._accept(key, token)
                for finish in event.finishes:
                    self._finish(finish.key)
            case Failed() | Refused():
                request = self._current(event.key)
                if request is not None:
                    request.reasons.append(event.reason)
                    self.apply(self.owner.outbox.revoke(request.ticket, self.now))
                    request.retry = True

    def _current(self, key: RequestKey) -> Request | None:
        request = self.requests[key.request]
        return request if request.key == key and not request.over else None

    def _accept(self, key: RequestKey, token: Token) -> None:
        request = self._current(key)
        if request is None:
            return
        assert token.index == len(request.log), f"{key}: {token} comes after {len(request.log)} tokens"
        request.log.append(token.token_id)

    def _finish(self, key: RequestKey) -> None:
        if (request := self._current(key)) is not None:
            request.over = True

    def resume(self) -> None:
        """Starts again what failed or was refused."""
        for request in self.requests.values():
            if request.retry and not request.over:
                self.start(request)

    # ---- the links ----------------------------------------------------------------------------------------------

    def apply(self, actions: Sequence[Action]) -> None:
        self.changes += 1
        for action in actions:
            match action:
                case ToRouter():
                    self.on_event(action.event)
                case OpenPull():
                    self.links[action.pull] = Link(action.message.ticket, deque([action.message]))
                case ToOwner():
                    self.links[action.pull].to_owner.append(action.message)
                case CloseStream():
                    self.links[action.pull].closing = True
                case ToPuller() if action.pull in self.links:
                    self.links[action.pull].to_puller.append(action.event)
                case SendBlock() if action.pull in self.links:
                    data = self.owner.runner.read_block(action.handle.id)
                    self.links[action.pull].to_puller.append((action.handle.position, data))
                    self.apply(self.owner.outbox.sent(action.pull, action.handle.position))
                case ClosePull() if action.pull in self.links:
                    self.links[action.pull].closing = True
                case FreeTicket():
                    self.owner.free(action.ticket)
                case ToPuller() | SendBlock() | ClosePull():
                    pass  # the stream is over
                case MeetPeers():
                    pass  # the owner is met
                case _:
                    raise AssertionError(f"nobody carries out {action}")

    def deliver(self, pull: int) -> bool:
        """One message of one link, towards the owner first; the end of the stream when nothing else is left."""
        link = self.links.get(pull)
        if link is None or not link.ready():
            return False
        if link.to_owner:
            self.apply(self.owner.outbox.pull_message(pull, link.to_owner.popleft(), self.now))  # type: ignore[arg-type]
        elif link.to_puller:
            self._arrive(pull, link.to_puller.popleft())
        else:
            del self.links[pull]
            self.apply(self.owner.outbox.pull_closed(pull, self.now))
            self.apply(self.core.pull_stream_closed(pull, self.now))
        return True

    def _arrive(self, pull: int, item: Any) -> None:
        if not isinstance(item, tuple) or hasattr(item, "_fields"):
            event: PullEvent = item
            self.apply(self.core.pull_event(pull, event, self.now))
            return
        position, data = item
        block = self.core.destination(pull, position)
        if block is None:
            self.apply(self.core.copy_failed(pull, position, self.now))
            return
        self.runner.write_block(block, data)
        digest = self.runner.cache.digest(block, position, self.core.block_tokens(pull, position))
        self.apply(self.core.copied(pull, {position: digest}, self.now))

    def advance(self, ticket: int) -> None:
        if ticket in self.owner.prefills:
            self.apply(self.owner.advance(ticket, self.now))

    # ---- the device ---------------------------------------------------------------------------------------------

    def launch(self) -> bool:
        if self.batch is None:
            self.batch = self.core.next_batch(self.now)
            self.changes += self.batch is not None
        return self.batch is not None

    def land(self) -> None:
        if self.batch is not None:
            batch, self.batch = self.batch, None
            self.steps += 1
            self.apply(self.core.on_step(self.runner.step(batch), self.now))

    def step(self) -> bool:
        """A whole step, if there is one."""
        launched = self.launch()
        self.land()
        return launched

    # ---- all of it ----------------------------------------------------------------------------------------------

    def audit(self) -> None:
        self.core.audit()
        assert sum(self.core.ledger().values()) == self.pool.num_blocks, self.core.ledger()

    def transfer(self) -> None:
        """All prompts are computed and copied as far as the decoder lets them."""
        while True:
            for ticket in list(self.owner.prefills):
                self.advance(ticket)
            moved = [self.deliver(pull) for pull in list(self.links)]
            self.audit()
            if not any(moved) and all(job.done == len(job.blocks) for job in self.owner.prefills.values()):
                return

    def settle(self, until: Callable[[], bool], limit: int = 2000) -> None:
        """Runs everything until `until()`."""
        for _ in range(limit):
            if until():
                return
            self.resume()
            self.transfer()
            self.step()
            self.audit()
        raise AssertionError("the world does not get there")

    def finish(self) -> None:
        """Everything ends, with the right tokens, and nothing is left behind."""
        self.settle(lambda: all(request.over for request in self.requests.values()))
        self.transfer()
        self.land()
        for request in self.requests.values():
            self.check(request)
        self.idle()

    def check(self, request: Request) -> None:
        expected = fake_tokens(request.prompt, request.params.max_tokens or 0, VOCAB, request.params, self.owner.eos)
        assert request.log == expected[: len(request.log)], f"request {request.id} has other tokens"

    def idle(self) -> None:
        assert self.core.idle, "the decoder still has work"
        self.core.audit()
        ledger = self.core.ledger()
        assert ledger["free"] + ledger["cached"] == self.pool.num_blocks, ledger
        self.owner.pool.audit([])
        assert not self.owner.prefills, "a ticket is left at the owner"
