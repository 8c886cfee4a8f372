"""A decode worker without its network: core and runner in one thread, as kvtransfer.driver runs them.

Prompts come from another worker by a one-sided path. Its messages are there as soon as they are waited for, and blocks
count as copied at once: the host does all that a decode stage has to do for a prompt, and the card nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from decode_service.decoder import Decoder
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.cuda_runner import CudaRunner, Launched
from engine.messages import (
    BlockHandle,
    BlocksSealed,
    BlocksValid,
    DecodeStart,
    Failed,
    FirstToken,
    Node,
    PullCopied,
    PullEvent,
    PullOpened,
    Refused,
    RequestKey,
    RouterHello,
    StepBatch,
    Ticket,
)
from engine.types import SamplingParams, Token
from kvtransfer.actions import Action, CloseStream, CopyBlocks, OpenPull, ToOwner, ToRouter
from pagewire.local_engine import NO_DEADLINE, NO_LIMIT, SESSION

OWNER = Node("prefill", 2, "elsewhere:1")
FIRST = Token(0, 5)  # what every prefill samples


class DecodeStage:
    """`rows` of the steps launched so far."""

    def __init__(self, runner: CudaRunner, config: EngineConfig) -> None:
        self.rows = 0
        self._runner = runner
        self.decoder = Decoder(
            Node("decode", 1, "here:1"), runner.layout, config, BlockPool(config.num_blocks),
            vocab_size=runner.vocab_size, eos_token_ids=runner.eos_token_ids, transport="cuda_ipc", depth=runner.depth,
        )  # fmt: skip
        self.decoder.attach(SESSION, RouterHello("router", 1, 1), time.monotonic())
        self._added: deque[DecodeStart] = deque()
        self._flights: deque[Launched] = deque()
        self._blocks: dict[int, int] = {}  # of the tickets that nobody has come for
        self._last_id = 0
        self._ended = 0

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """A request whose prompt is computed. Its seed and max_tokens are set."""
        self._last_id += 1
        blocks = self.decoder.scheduler.blocks_for(len(prompt_ids))
        ticket = Ticket(self._last_id, OWNER, len(prompt_ids), blocks, NO_DEADLINE)
        self._blocks[ticket.id] = blocks
        key = RequestKey(self._last_id, 1, 1)
        self._added.append(DecodeStart(key, ticket, prompt_ids, 0, params, NO_DEADLINE, 0.0, NO_LIMIT))

    def step(self) -> int:
        """Reads one step, with as many behind it as the runner takes; how many requests it ended. What was added starts
        while the card works, as what comes to a worker does while its device thread waits for a step."""
        now = time.monotonic()
        while (batch := self.decoder.next_batch(now)) is not None:
            self.rows += len(batch.rows)
            self._flights.append(self._runner.submit(batch))
        self._start_added(now)
        self._ended = 0
        if self._flights:
            output = self._runner.collect(self._flights.popleft())
            now = time.monotonic()
            self._carry(self.decoder.on_step(output, now), now)
        return self._ended

    def _start_added(self, now: float) -> None:
        """At least one, and more until there is a step to read: a driver's loop takes messages one at a time, too."""
        while self._added:
            self._carry(self.decoder.on_command(SESSION, self._added.popleft(), now), now)
            if self._flights and self._flights[0].ended:
                return

    def _carry(self, actions: Iterable[Action], now: float) -> None:
        decoder = self.decoder
        for action in actions:
            match action:
                case OpenPull(pull, _, message):
                    self._hear(pull, PullOpened(message.layout_digest), now)
                    self._hear(pull, _sealed(self._blocks.pop(message.ticket)), now)
                    self._hear(pull, FirstToken(message.key._replace(placement=0), FIRST), now)
                case CopyBlocks(pull, handles):
                    copied = {at: 0 for _, _, at, _ in handles if decoder.destination(pull, at) is not None}
                    self._carry(decoder.copied(pull, copied, now), now)
                case ToOwner(pull, PullCopied(handles)):
                    self._hear(pull, BlocksValid(tuple(handle.position for handle in handles)), now)
                case CloseStream(pull):
                    self._carry(decoder.pull_stream_closed(pull, now), now)
                case ToRouter(_, StepBatch(finishes=finishes)):
                    self._ended += len(finishes)
                case ToRouter(_, Refused() | Failed() as wrong):
                    raise RuntimeError(f"{wrong}")

    def _hear(self, pull: int, event: PullEvent, now: float) -> None:
        self._carry(self.decoder.pull_event(pull, event, now), now)


@lru_cache
def _sealed(blocks: int) -> BlocksSealed:
    """All of a prompt's."""
    return BlocksSealed(tuple(BlockHandle(position, 0, position, 0) for position in range(blocks)))
