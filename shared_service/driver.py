"""Drives both stages of one process: two cores over one pool, whose steps take turns on one device.

Decode goes first: between two of its steps the device computes at most one chunk of prompts, which Pace bounds. The
two hand blocks to each other through a LocalPair, in one step on the loop. Decides nothing else; a stage's sessions,
its clock and the border of its steps are those of kvtransfer.driver.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decode_service.decoder import Decoder
from engine.batch import Batch, StepOutput
from engine.device_thread import DeviceThread
from kvtransfer.actions import Action, ClosePull, SendBlock, ToPuller, ToRouter
from kvtransfer.driver import TICK_S, AheadRunner, Driver, StepFailed
from kvtransfer.transports.local import LocalPair
from prefill_service.prefiller import Prefiller
from shared_service.pace import Pace
from wire.observer import Observer

_TO_PULLERS = (ToPuller, SendBlock, ClosePull)
_DECODE_SESSIONS = 1 << 62  # the decode stage numbers its sessions from here on: a number names its stage


class StageDriver(Driver):
    """One stage. What its core asks for goes through the pair first; the rest comes back by `deliver`."""

    def __init__(
        self,
        core: Prefiller | Decoder,
        step: Callable[[Batch], StepOutput],
        device: DeviceThread,
        ahead: AheadRunner | None,
        observer: Observer,
        apply: Callable[[Sequence[Action]], None],
        first_session: int,
    ) -> None:
        super().__init__(core, step, device, ahead, observer=observer)
        self._through_the_pair = apply
        self._last_session = first_session
        self.ahead = ahead

    @property
    def audited(self) -> bool:
        """Nothing was asked of it since its blocks were last accounted for."""
        return self._audited

    @audited.setter
    def audited(self, value: bool) -> None:
        self._audited = value

    def apply(self, actions: Sequence[Action]) -> None:
        self._through_the_pair(actions)

    def deliver(self, action: Action) -> None:
        super().apply([action])

    def next_batch(self) -> Batch | None:
        return self._next_batch()

    async def launch(self, batch: Batch) -> Any:
        """What `collect` takes; without `ahead` it is the output itself. Raises StepFailed."""
        return await self._on_device(self._step_on_device if self.ahead is None else self.ahead.submit, batch)

    async def collect(self, launched: Any) -> StepOutput:
        return launched if self.ahead is None else await self._on_device(self.ahead.collect, launched)

    def report(self, output: StepOutput) -> None:
        self._on_step(output)

    async def failed(self, failure: StepFailed) -> None:
        if self.ahead is not None:
            await self._device.run(self.ahead.abandon)
        self.apply(self.core.step_failed({"error_id": str(failure)}, time.monotonic()))


@dataclass(slots=True, eq=False)
class _Turn:
    """A step that was launched and not reported."""

    stage: StageDriver
    tokens: int
    launched: Any
    at: float


class SharedDriver:
    """`decodes` and then `prefills` give it its stages, over one pool. Their runners share weights, cache and stream;
    where a runner takes one step at a time they are the same. `pace` learns from what it sees.
    """

    def __init__(self, device: DeviceThread, pace: Pace) -> None:
        self.pace = pace
        self.decoder: Decoder
        self.prefiller: Prefiller
        self.decode: StageDriver
        self.prefill: StageDriver
        self._device = device
        self._pair: LocalPair
        self._turns: deque[_Turn] = deque()  # as the device runs them
        self._last: StageDriver | None = None  # that was launched
        self._reported_at = 0.0
        self._clock: Callable[[], tuple[int, int]] | None = None
        self._step_ended = 0  # on the device's clock
        self._between = 0  # prompt tokens that it computed since
        self._wake = asyncio.Event()

    def decodes(
        self,
        core: Decoder,
        runner: Any,
        ahead: AheadRunner | None,
        observer: Observer,
        clock: Callable[[], tuple[int, int]] | None = None,
    ) -> StageDriver:
        """`clock`: when the step that was read last began and ended on the device, in nanoseconds. Without one the
        host's times are taken, which know of a step's end only when nothing keeps the host from looking."""
        self.decoder = core
        self._clock = clock
        self.decode = StageDriver(core, runner.step, self._device, ahead, observer, self.apply, _DECODE_SESSIONS)
        return self.decode

    def prefills(self, core: Prefiller, runner: Any, ahead: AheadRunner | None, observer: Observer) -> StageDriver:
        self.prefiller = core
        self.prefill = StageDriver(core, runner.step, self._device, ahead, observer, self.apply, 0)
        self._pair = LocalPair(core, self.decoder)
        return self.prefill

    @property
    def stuck(self) -> bool:
        return self.prefill.stuck or self.decode.stuck

    def apply(self, actions: Sequence[Action]) -> None:
        for action in self._pair.carry(actions, time.monotonic()):
            if isinstance(action, ToRouter):
                stage = self.prefill if action.session <= _DECODE_SESSIONS else self.decode
            else:  # of pulls between this process and others
                stage = self.prefill if isinstance(action, _TO_PULLERS) else self.decode
            stage.deliver(action)
        self._wake.set()

    # ---- turns ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled. Raises only for a broken invariant of a core, after which nothing can be trusted."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine())
            tasks.create_task(self._tick())

    async def _engine(self) -> None:
        while True:
            self._wake.clear()  # before asking: work that arrives after the cores said None must wake us
            if await self._launch():
                continue
            if self._turns:
                await self._report(self._turns.popleft())
            else:
                await self._wake.wait()

    async def _launch(self) -> bool:
        """Gives the device one more step, if there is one whose turn it is."""
        stages = (self.prefill, self.decode) if self._last is self.decode else (self.decode, self.prefill)
        for stage in stages:
            batch = self._next(stage)
            if batch is None:
                continue
            self._last = stage
            turn = _Turn(stage, batch.num_tokens, None, time.monotonic())
            try:
                turn.launched = await stage.launch(batch)
            except StepFailed as failure:
                await self._fail(stage, failure)
                return True
            if stage.ahead is None:
                await self._report(turn)
            else:
                self._turns.append(turn)
            return True
        return False

    def _next(self, stage: StageDriver) -> Batch | None:
        if stage is self.prefill:
            decoding = any(turn.stage is self.decode for turn in self._turns)
            if decoding and self._last is self.prefill:  # one chunk between two steps
                return None
            self.prefiller.budget = self.pace.tokens(decoding or bool(self.decoder.scheduler.running))
        return stage.next_batch()

    async def _report(self, turn: _Turn) -> None:
        stage = turn.stage
        try:
            output = await stage.collect(turn.launched)
        except StepFailed as failure:
            await self._fail(stage, failure)
            return
        self._learn(turn)
        stage.report(output)
        if stage is self.decode:  # it may have given blocks back
            self.apply(self.prefiller.admit(time.monotonic()))

    def _learn(self, turn: _Turn) -> None:
        """How long it took: from the end of the step before, as they run one after the other."""
        now = time.monotonic()
        took = now - max(turn.at, self._reported_at)
        self._reported_at = now
        if turn.stage is self.prefill:
            if self._clock is None or not any(other.stage is self.decode for other in self._turns):
                self.pace.prefilled(turn.tokens, took)
            else:  # the decode step behind it will tell
                self._between += turn.tokens
        elif self._clock is None:
            self.pace.decoded(took)
        else:
            began, ended = self._clock()
            self.pace.decoded((ended - began) / 1e9)
            if self._between:
                self.pace.prefilled(self._between, (began - self._step_ended) / 1e9)
            self._step_ended, self._between = ended, 0

    async def _fail(self, stage: StageDriver, failure: StepFailed) -> None:
        """Its steps that were launched after the one that failed are not reported either."""
        self._turns = deque(turn for turn in self._turns if turn.stage is not stage)
        await stage.failed(failure)

    # ---- the clock ------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.apply(self.prefiller.tick(now))
            self.apply(self.decoder.tick(now))
            if self.prefiller.idle and self.decoder.idle and not (self.prefill.audited and self.decode.audited):
                self.prefiller.audit(self.decoder.holders())
                self.decoder.audit(self.prefiller.holders())
                self.prefill.audited = self.decode.audited = True

    async def drain(self, grace: float) -> None:
        """Both stages at once: a prompt that is computed goes on as rows of the other."""
        await asyncio.gather(self.prefill.drain(grace), self.decode.drain(grace))
