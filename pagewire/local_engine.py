"""Both stages over one pool and one runner, in one thread: no network, nothing copied, one loop that a caller steps.

Plays the router's part for its own requests: starts each stage, keeps the log of tokens and starts a request again
where a stage let go of it. Owns the pool and both cores; the runner and its cache are the caller's.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engine.messages import (
    Cancel,
    DecodeStart,
    Failed,
    FirstToken,
    Node,
    PrefillAccepted,
    PrefillStart,
    Refused,
    RequestKey,
    RouterHello,
    StepBatch,
    Ticket,
)
from engine.types import FinishReason, SamplingParams, Token, TokenLogprob

SESSION = 1
NO_LIMIT = 2**31 - 1
NO_DEADLINE = 1e9  # seconds

Produced = tuple[int, Token, FinishReason | None]


class Begun(NamedTuple):
    """What is known of a request with its first token: prompt tokens from the cache, seconds that it waited."""

    cached_tokens: int
    queued: float


@dataclass(slots=True)
class _Request:
    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    submitted: float
    log: list[int] = field(default_factory=list)
    attempt: int = 0
    cached_tokens: int = 0


class LocalEngine:
    """A synchronous engine. `runner` is a ModelRunner or a FakeRunner, its cache of config.num_blocks blocks; `config`
    an EngineConfig. (Types of engine are not named here: importing pagewire loads no engine.)

    `prompt_logprobs` has an entry for each request that asked, and `begun` one for each, from its first token on; the
    caller takes it out.
    """

    def __init__(self, runner: Any, config: Any, *, seed: int = 0, headroom: int = 2) -> None:
        from decode_service.decoder import Decoder
        from engine.blocks import BlockPool
        from kvtransfer.transports.local import LocalPair
        from prefill_service.prefiller import Prefiller

        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        self.begun: dict[int, Begun] = {}
        self._runner = runner
        self._depth = getattr(runner, "depth", 1)  # steps that it takes before the first is read
        self._flights: deque[tuple[int, int, Any]] = deque()  # rows that run, prompts, what the runner gave for them
        self._rng = random.Random(seed)
        self._requests: dict[int, _Request] = {}
        self._produced: list[Produced] = []
        self._last_id = 0
        node, layout, eos = Node("local", 1, "in-process:0"), runner.cache.layout, runner.eos_token_ids
        self._decoder = Decoder(
            node, layout, config, self.pool, vocab_size=runner.vocab_size, eos_token_ids=eos,
            max_waiting=NO_LIMIT, headroom=headroom, depth=self._depth,
        )  # fmt: skip
        self._prefiller = Prefiller(
            node, layout, config, self.pool, vocab_size=runner.vocab_size, eos_token_ids=eos, rng=self._rng,
            digests=False, max_waiting=NO_LIMIT, promises=self._decoder, depth=self._depth,
        )  # fmt: skip
        self._pair = LocalPair(self._prefiller, self._decoder)
        now = time.monotonic()
        self._prefiller.attach(SESSION, RouterHello("local", 1, 1), now)
        self._decoder.attach(SESSION, RouterHello("local", 1, 1), now)

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """The request's number. Raises ValueError, with the numbers, for a prompt that can never be served."""
        params = self._resolve(len(prompt_ids), params or SamplingParams())
        self._last_id += 1
        request = _Request(self._last_id, tuple(prompt_ids), params, time.monotonic())
        self._requests[request.id] = request
        self._start(request)
        return request.id

    def _resolve(self, tokens: int, params: SamplingParams) -> SamplingParams:
        """Sets the seed and max_tokens. The last token is never fed back, so it needs no place of its own."""
        most = min(self.config.max_model_len, self.config.num_blocks * self.config.block_size + 1)
        if tokens < 1:
            raise ValueError("the prompt is empty")
        if tokens >= most:
            raise ValueError(f"the prompt has {tokens} tokens and at most {most - 1} fit")
        if tokens + (params.max_tokens or 1) > most:
            raise ValueError(f"{tokens} prompt tokens and max_tokens {params.max_tokens} are more than {most}")
        seed = self._rng.getrandbits(64) if params.seed is None else params.seed
        return replace(params, seed=seed, max_tokens=params.max_tokens or most - tokens)

    def _start(self, request: _Request) -> None:
        """A new attempt, from the prompt and all that was produced."""
        request.attempt += 1
        now = time.monotonic()
        start = PrefillStart(
            key=RequestKey(request.id, request.attempt),
            token_ids=request.prompt + tuple(request.log),
            emitted=len(request.log),
            params=request.params,
            deadline=NO_DEADLINE,
            age=now - request.submitted,
        )
        self._carry(self._prefiller.on_command(SESSION, start, now), now)

    def cancel(self, request_id: int) -> None:
        """Ends a request; does nothing if it is over."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._let_go(request)

    def _let_go(self, request: _Request) -> None:
        """Neither stage works on this attempt any more."""
        now = time.monotonic()
        key = RequestKey(request.id, request.attempt)
        self._carry(self._prefiller.on_command(SESSION, Cancel(key), now), now)
        self._carry(self._decoder.on_command(SESSION, Cancel(key._replace(placement=1)), now), now)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._produced or self._flights)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Produced]:
        """Runs one batch, of prompt chunks and of one token for each running request; returns what it produced.

        A runner that takes several steps has the next ones before the one that is returned has ended.
        """
        while len(self._flights) < self._depth and self._launch():
            pass
        if self._flights:
            self._read()
        else:
            assert not self._requests or self._produced, f"nothing can run: {self._decoder.load()}"
        while self._flights and not self._requests:  # of requests that ended meanwhile
            self._read()
        produced, self._produced = self._produced, []
        return produced

    def _launch(self) -> bool:
        now = time.monotonic()
        self._carry(self._prefiller.admit(now), now)  # decode may have given blocks back
        prompts, running = self._prefiller.next_batch(now), self._decoder.next_batch(now)
        if prompts is None and running is None:
            return False
        counts = len(running.rows) if running else 0, len(prompts.rows) if prompts else 0
        batch = self._join(prompts, running)
        self._flights.append((*counts, self._runner.submit(batch) if self._depth > 1 else self._runner.step(batch)))
        return True

    def _join(self, prompts: Any, running: Any) -> Any:
        """One batch of both; the prompts' slots come after those of the running requests."""
        if prompts is None or running is None:
            return prompts or running
        for row in prompts.rows:
            row.slot += self.config.max_num_seqs
        running.rows += prompts.rows
        running.zero_blocks += prompts.zero_blocks
        running.digests += prompts.digests
        return running

    def _read(self) -> None:
        running, prompts, launched = self._flights.popleft()
        output = self._runner.collect(launched) if self._depth > 1 else launched
        now = time.monotonic()
        mine, rest = output, output
        if running and prompts:
            tokens, reports = output.tokens, output.prompt_logprobs
            mine = replace(output, tokens=tokens[:running], prompt_logprobs=reports[:running], digests=[])
            rest = replace(output, tokens=tokens[running:], prompt_logprobs=reports[running:])
        if running:
            self._carry(self._decoder.on_step(mine, now), now)
        if prompts:
            self._carry(self._prefiller.on_step(rest, now), now)

    # ---- the router's part ----------------------------------------------------------------------------------------

    def _carry(self, actions: Sequence[Any], now: float) -> None:
        """Everything between the two stages is carried out at once; their events are ours."""
        if not actions:
            return
        events: deque[Any] = deque(self._pair.carry(actions, now))
        while events:
            if follow := self._on_event(events.popleft().event, now):
                events.extend(self._pair.carry(follow, now))

    def _on_event(self, event: object, now: float) -> list[Any]:
        match event:
            case PrefillAccepted() if request := self._current(event.key):
                request.cached_tokens = max(request.cached_tokens, min(event.cached_tokens, len(request.prompt)))
                return self._place(request, event.key, event.ticket, now)
            case FirstToken() if request := self._current(event.key):
                if not request.log:
                    self.begun[request.id] = Begun(request.cached_tokens, event.times.queued)
                if event.prompt_logprobs:
                    self.prompt_logprobs.setdefault(request.id, event.prompt_logprobs)
                self._accept(request, event.token, event.finish_reason)
            case StepBatch():
                self._accept_all(event)
            case Failed() | Refused() if request := self._current(event.key):
                if isinstance(event, Refused) or not event.resumable:
                    raise RuntimeError(f"request {request.id} failed: {event.reason.name} {dict(event.facts)}")
                self._let_go(request)
                self._start(request)
        return []

    def _current(self, key: RequestKey) -> _Request | None:
        """The request, if this is about its attempt that counts."""
        request = self._requests.get(key.request)
        return request if request is not None and request.attempt == key.attempt else None

    def _place(self, request: _Request, key: RequestKey, ticket: Ticket, now: float) -> list[Any]:
        """Decode is told at once, while the prompt is computed; not if the prefill's token is the last."""
        if len(request.log) + 1 >= (request.params.max_tokens or NO_LIMIT):
            return []
        start = DecodeStart(
            key=key._replace(placement=1),
            ticket=ticket,
            token_ids=request.prompt + tuple(request.log),
            emitted=len(request.log),
            params=request.params,
            deadline=NO_DEADLINE,
            age=now - request.submitted,
            until_index=NO_LIMIT,
        )
        return self._decoder.on_command(SESSION, start, now)

    def _accept(self, request: _Request, token: Token, reason: FinishReason | None) -> None:
        """Token 0 comes twice, from the prefill and as the decode stage's echo: the first one counts."""
        if token.index != len(request.log):
            return
        request.log.append(token.token_id)
        self._produced.append((request.id, token, reason))
        if reason is not None:
            del self._requests[request.id]

    def _accept_all(self, batch: StepBatch) -> None:
        """The same for each row of a step."""
        requests, ends = self._requests, {finish.key.request: finish.reason for finish in batch.finishes}
        for key, token in batch.rows:
            request = requests.get(key.request)
            if request is not None and request.attempt == key.attempt:
                self._accept(request, token, ends.get(key.request) if ends else None)

    # ---- what others may know -------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raises AssertionError if a block is unaccounted for; with no work left, if one is held."""
        self._decoder.audit(self._prefiller.holders())
        self._prefiller.audit(self._decoder.holders())
        if not self.has_work:
            assert self._prefiller.idle and self._decoder.idle, "a stage has work for nobody"
            ledger = self.pool.ledger()
            assert ledger["referenced"] == 0, f"blocks are held for nobody: {ledger}"
