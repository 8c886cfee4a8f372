"""One simulated run: a router, two prefill and two decode workers, clients, and one seed that decides everything.

`World(seed).run()` returns a Report or raises Violation. The oracle: the tokens of each request are those of an
unbroken run, in order, none twice or missing; one End each; books that balance at every audit; and once faults
have stopped every request ends and every block, ticket, slot and stream is gone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.fake_runner import fake_tokens
from engine.messages import DecodeStart, Failed, PrefillStart, Refused, RouterHello, WorkerHello
from engine.stopping import finish_of
from engine.types import FinishReason, SamplingParams
from router.actions import Action, Emit, Outcome, RouterRequest, ToWorker
from router.actions import End as Ended
from router.admission import RouterConfig
from router.dispatch import Dispatcher
from tests.sim.faults import Faults
from tests.sim.network import Clock, End, Network, Process, Stream
from tests.sim.violation import Violation
from tests.sim.workers import EOS, POISON, VOCAB, DecodeProcess, PrefillProcess, WorkerProcess


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes and times of one run, in seconds. Drawn per seed: fixed ones let one defence hide another's lack."""

    requests: int
    max_delay: float
    step_seconds: float
    copy_seconds: float
    tick: float
    silence: float
    ticket_ttl: float
    progress_seconds: float
    slow_client: float
    window: int
    headroom: int
    concurrent: int
    leavers: float  # the part of the clients that cancel
    loss: float
    audit_every: int
    prefill_blocks: int
    decode_blocks: int

    @classmethod
    def draw(cls, rng: random.Random, lossy: bool) -> Tuning:
        return cls(
            requests=rng.randint(4, 14),
            max_delay=rng.choice((0.002, 0.02, 0.2)),
            step_seconds=rng.choice((0.02, 0.05, 0.2)),
            copy_seconds=rng.choice((0.001, 0.02, 0.1)),
            tick=rng.choice((0.1, 0.25)),
            silence=rng.choice((0.5, 1.0, 3.0)),
            ticket_ttl=rng.choice((0.3, 2.0, 8.0)),
            progress_seconds=rng.choice((1.0, 3.0)),
            slow_client=rng.choice((2.0, 6.0)),
            window=rng.choice((2, 6, 64)),
            headroom=rng.choice((0, 2)),
            concurrent=rng.choice((3, 100)),
            leavers=rng.choice((0.05, 0.1, 0.5)),
            loss=rng.choice((0.002, 0.02)) if lossy else 0.0,
            audit_every=rng.choice((1, 7, 29)),
            prefill_blocks=rng.randint(6, 16),
            decode_blocks=rng.randint(6, 16),
        )


@dataclass(slots=True)
class Client:
    """One request as its client sees it. `patience` is when it leaves, `stalls` at which token it stops reading."""

    asked: RouterRequest
    expected: list[int]
    finish: FinishReason
    request: int = 0
    submitted: bool = False
    received: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    ended_at: float = 0.0
    patience: float | None = None
    stop_at: int | None = None
    stalls_at: int | None = None
    stalls_for: float = 0.0
    deadline_at: float = 0.0
    reads_at: float = 0.0
    read: int = 0


@dataclass(slots=True)
class Report:
    codes: Counter[str]
    events: int
    seconds: float
    faults: Counter[str]  # what was done to the run
    seen: Counter[str]  # what the cores met because of it


class RouterProcess(Process):
    """The router core and its sessions."""

    def __init__(self, world: World) -> None:
        super().__init__("router", world.clock)
        self.world = world
        self.sessions: dict[str, Stream] = {}
        self.clients: dict[int, Client] = {}
        self._session = 0

    def start(self) -> None:
        self.born()
        tuning = self.world.tuning
        config = RouterConfig(
            max_concurrent_requests=tuning.concurrent, credit_window=tuning.window, slow_client=tuning.slow_client,
            no_worker_grace=120.0, restart_grace=120.0,
        )  # fmt: skip
        self.incarnation = self.world.rng.getrandbits(63)
        self.core = Dispatcher(config, random.Random(self.world.rng.getrandbits(64)), self.clock.now)
        self.sessions.clear()
        self.clients.clear()
        for worker in self.world.workers:
            self.connect(worker)
        self.post(0.0, self.tick)

    def tick(self) -> None:
        self.act(self.core.tick(self.clock.now))
        self.core.audit()
        self.post(self.world.tuning.tick, self.tick)

    def connect(self, worker: WorkerProcess) -> None:
        if not worker.alive or self.world.network.blocked(self, worker):
            if not worker.forever_dead:
                self.post(self.world.rng.uniform(0.1, 0.6), lambda: self.connect(worker))
            return
        self._session += 1
        session = self._session
        up = [False]  # whether the worker has greeted

        def message(event: Any) -> None:
            if isinstance(event, WorkerHello):
                up[0] = True
                self.sessions[worker.name] = stream
                self.act(self.core.worker_up(worker.name, worker.role, event, self.clock.now))
            else:
                if isinstance(event, Failed | Refused):
                    self.world.seen[f"{worker.role.value} {type(event).__name__} {event.reason.name}"] += 1
                self.act(self.core.on_event(worker.name, worker.role, event, self.clock.now))

        def closed() -> None:
            if up[0]:
                del self.sessions[worker.name]
                self.act(self.core.worker_down(worker.name, worker.role, self.clock.now))
            self.post(self.world.rng.uniform(0.05, 0.4), lambda: self.connect(worker))

        near = End(self, message, closed)
        far = End(
            worker,
            lambda m: worker.session_message(stream, session, m),
            lambda: worker.session_closed(session),
        )
        stream = self.world.network.open(near, far)
        stream.send(0, RouterHello("router", self.incarnation, session))

    # ---- clients --------------------------------------------------------------------------------------------

    def submit(self, client: Client) -> None:
        """Also after a router's death: the client comes back with the tokens that it holds."""
        client.submitted = True
        client.read = len(client.received)
        left = client.deadline_at - self.clock.now
        asked = replace(client.asked, deadline=left, resume=tuple(client.received))
        client.request, actions = self.core.submit(asked, self.clock.now)
        if client.request in self.clients:
            raise Violation(f"request key {client.request} is minted twice")
        self.clients[client.request] = client
        self.act(actions)
        if client.patience is not None:
            self.post(client.patience, lambda: self.act(self.core.cancel(client.request, self.clock.now)))

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, ToWorker):
                if isinstance(action.command, PrefillStart | DecodeStart):
                    self.count_start(action.command)
                if (stream := self.sessions.get(action.address)) is not None:
                    stream.send(0, action.command)
            elif isinstance(action, Emit):
                self.emitted(self.clients[action.request], action)
            else:
                self.ended(self.clients[action.request], action)

    def count_start(self, start: PrefillStart | DecodeStart) -> None:
        if start.key.placement > 1:
            self.world.seen["another placement"] += 1
        elif start.key.attempt > 1 and start.key.placement == 0:
            self.world.seen[f"attempt {min(start.key.attempt, 5)}"] += 1

    def emitted(self, client: Client, emit: Emit) -> None:
        if client.outcome is not None:
            raise Violation(f"request {client.request:#x}: tokens after its end")
        for token in emit.tokens:
            if token.index != len(client.received):
                raise Violation(f"request {client.request:#x}: index {token.index} after {len(client.received)} tokens")
            client.received.append(token.token_id)
        got, due = client.received, client.expected
        if got != due[: len(got)]:
            raise Violation(f"request {client.request:#x}: tokens {got} instead of {due[: len(got)]}")
        if client.stop_at is not None and len(got) >= client.stop_at:
            self.post(0.0, lambda: self.act(self.core.stop(client.request, self.clock.now)))
        client.reads_at = max(client.reads_at, self.clock.now) + self.world.rng.random() * 0.05
        if client.stalls_at is not None and len(got) >= client.stalls_at:
            client.reads_at, client.stalls_at = self.clock.now + client.stalls_for, None
        unread, flow = len(got) - client.read, self.core.flows.get(client.request)
        if (
            flow is not None and unread > self.world.tuning.window + flow.attempt
        ):  # each attempt prefills one uncredited
            raise Violation(
                f"request {client.request:#x}: {unread} tokens unread, the window is {self.world.tuning.window}"
            )
        index, wait = len(got), client.reads_at - self.clock.now
        self.post(wait, lambda: self.read(client, index))

    def read(self, client: Client, index: int) -> None:
        client.read = index
        self.act(self.core.consumed(client.request, index, self.clock.now))

    def ended(self, client: Client, end: Ended) -> None:
        if client.outcome is not None:
            raise Violation(f"request {client.request:#x} ends twice")
        client.outcome = end.outcome
        client.ended_at = self.clock.now
        self.world.judge_end(client)


class World:
    """`lossy`: single messages vanish or come twice. `poison`: nothing else goes wrong, but the first request takes
    down every worker that decodes it.
    """

    def __init__(self, seed: int, *, lossy: bool = False, poison: bool = False, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(f"pagewire-{seed}-{lossy}")
        self.tuning = Tuning.draw(self.rng, lossy)
        if poison:  # tickets that expire under way would count as failed copies
            self.tuning = replace(self.tuning, ticket_ttl=8.0, progress_seconds=3.0)
        self.clock = Clock()
        self.network = Network(self.clock, self.rng, self.tuning.max_delay, self.tuning.silence, self.tuning.loss)
        self.trace = trace
        kind = random.Random(f"paths-{seed}")  # its own draw: the others stay those of a seed
        self.paths = kind.choice((("grpc",), ("memfd",), ("nixl",), ("grpc", "memfd", "nixl")))
        self.digests = kind.random() < 0.5
        self.faults = Faults(self)
        if not self.digests:
            self.faults.corrupt = 0.0  # nothing would notice
        self.faults.calm = self.poison = poison
        self.router = RouterProcess(self)
        self.workers: list[WorkerProcess] = [
            *(PrefillProcess(self, f"p{i}", self.tuning.prefill_blocks + i) for i in (1, 2)),
            *(DecodeProcess(self, f"d{i}", self.tuning.decode_blocks + i) for i in (1, 2)),
        ]
        self.processes: dict[str, Process] = {each.name: each for each in (self.router, *self.workers)}
        self.clients: list[Client] = []
        self.seen: Counter[str] = Counter()
        self._pulls = 0

    def next_pull(self) -> int:
        self._pulls += 1
        return self._pulls

    # ---- the run --------------------------------------------------------------------------------------------

    def run(self) -> Report:
        for worker in self.workers:
            worker.start()
        self.router.start()
        shared = [self.rng.randrange(VOCAB) for _ in range(200)]
        for _ in range(self.tuning.requests):
            client = self.client(shared)
            if self.poison:
                client = self.patient(client, poison=not self.clients)
            self.clients.append(client)
            self.clock.at(
                self.rng.random() * self.faults.until * self.faults.burst, lambda client=client: self.arrive(client)
            )
        self.faults.plan()
        events = self.until(lambda: self.clock.now > self.faults.until, 10_000)
        events += self.until(lambda: all(c.outcome is not None for c in self.clients), 400.0)
        for client in self.clients:
            if client.outcome is None:
                raise Violation(f"request {client.request:#x} never ends: {self.describe(client)}")
        calm = self.clock.now
        events += self.until(self.drained, 60.0)
        self.check_drained(self.clock.now - calm)
        codes = Counter(client.outcome.code for client in self.clients if client.outcome)
        return Report(codes, events, self.clock.now, self.faults.done, self.seen)

    def until(self, done: Callable[[], bool], seconds: float) -> int:
        limit, events = self.clock.now + seconds, 0
        while self.clock.now < limit:
            if events % 16 == 0 and done():
                break
            self.clock.run_next()
            events += 1
        return events

    def arrive(self, client: Client) -> None:
        if not client.submitted:
            client.deadline_at = self.clock.now + client.asked.deadline
        if not self.router.alive or self.router.stopped:
            self.clock.at(self.clock.now + 0.1, lambda: self.arrive(client))
        else:
            self.router.submit(client)

    def client(self, shared: Sequence[int]) -> Client:
        rng = self.rng
        room = (min(self.tuning.prefill_blocks, self.tuning.decode_blocks) + 1) * 16
        max_tokens = rng.choice((1, 2, rng.randint(3, 40)))
        size = rng.randint(1, min(100, room - max_tokens))
        common = rng.choice((0, 0, size // 2, size - 1))
        prompt = [*shared[:common], *(rng.randrange(VOCAB) for _ in range(size - common))]
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(32), max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, min(3, max_tokens))), ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(range(100, 120)) if rng.random() < 0.3 else (),
        )  # fmt: skip
        tokens = fake_tokens(prompt, max_tokens, VOCAB, params, EOS)
        expected, finish = tokens, FinishReason.LENGTH
        for index, token in enumerate(tokens):
            reason, _ = finish_of(token, index, params, EOS)
            if reason is not None:
                expected, finish = tokens[: index + 1], reason
                break
        kind = rng.random()
        deadline = rng.uniform(0.2, 5.0) if kind < 0.06 else 40.0 if self.tuning.loss else 1000.0
        client = Client(RouterRequest(prompt, params, deadline, rng.choice((b"", b"tenant"))), expected, finish)
        if rng.random() < self.tuning.leavers:
            client.patience = rng.random() * rng.choice((0.3, 3.0))
        elif kind < 0.12:
            client.stop_at = rng.randint(1, max_tokens)
        elif kind < 0.20:
            client.stalls_at = rng.randint(1, max_tokens)
            client.stalls_for = rng.choice((1.0, 1000.0))
        return client

    def patient(self, client: Client, *, poison: bool) -> Client:
        """The same request of a client that waits and reads; the prompt is poison or it is not."""
        prompt = list(client.asked.prompt_ids)
        prompt[0] = POISON if poison else prompt[0] % POISON
        params = replace(client.asked.params, ignore_eos=True, stop_token_ids=(), max_tokens=8, min_tokens=0)
        expected = fake_tokens(prompt, 8, VOCAB, params, EOS)
        return Client(RouterRequest(prompt, params, 1000.0), expected, FinishReason.LENGTH)

    def poisonous(self, prompt: Sequence[int]) -> bool:
        return self.poison and prompt[0] == POISON

    # ---- the oracle -----------------------------------------------------------------------------------------

    def judge_end(self, client: Client) -> None:
        outcome = client.outcome
        assert outcome is not None
        self.say("router", f"request {client.request:#x} ends {outcome.code} {outcome.sentence}")
        match outcome.code:
            case "OK" if client.stop_at is not None and len(client.received) >= client.stop_at:
                return
            case "OK":
                if client.received != client.expected or outcome.finish_reason is not client.finish:
                    raise Violation(
                        f"request {client.request:#x} ends {outcome.finish_reason} with {client.received}, "
                        f"due are {client.finish} with {client.expected}"
                    )
                return
            case "CANCELLED" if client.patience is not None:
                return
            case "DEADLINE_EXCEEDED" if self.clock.now >= client.deadline_at:
                return
            case "RESOURCE_EXHAUSTED" if client.stalls_for > 0:
                return
            case "UNAVAILABLE" if "failed under this request" in outcome.sentence:
                return
            case "UNAVAILABLE" if "went down while they ran" in outcome.sentence:
                return
        raise Violation(f"request {client.request:#x} ends {outcome.code}: {outcome.sentence} {outcome.facts}")

    def drained(self) -> bool:
        return self.router.core.idle and all(w.core.idle and not w.pulls for w in self.workers if w.alive)

    def check_drained(self, seconds: float) -> None:
        self.router.core.audit()
        if not self.router.core.idle:
            raise Violation(f"the router still has {list(self.router.core.flows)}")
        for worker in self.workers:
            if not worker.alive:
                continue
            worker.core.audit()
            ledger = worker.pool.ledger()
            if not worker.core.idle or ledger["referenced"] or worker.pulls:
                raise Violation(f"{worker.name} after {seconds:.0f} s of calm: {ledger}, {len(worker.pulls)} pulls")

    def restart_router(self) -> None:
        self.router.start()
        for client in self.clients:
            if client.submitted and client.outcome is None:
                self.seen["client comes back"] += 1
                self.router.post(self.rng.random() * 0.5, lambda client=client: self.router.submit(client))

    def describe(self, client: Client) -> str:
        flow = self.router.core.flows.get(client.request)
        if flow is None:
            return "the router does not know it"
        return f"wants {flow.wants}, legs {flow.legs}, log {len(flow.log)} of {len(client.expected)}, {flow.ignored}"

    def say(self, who: str, what: str) -> None:
        if self.trace:
            print(f"{self.clock.now:9.4f} {who:7} {what}")
