"""Drives both stages of one process: two cores over one pool, each with its own engine loop.

On a card each stage has a thread and a stream of its own, and Pace keeps decode from taking everything. With one device
thread for both, as on the CPU, their steps take turns, because each has at most one step in its queue: between two
steps of decode runs one chunk of prompts, which Chunks bounds. Blocks go from one stage to the other through a
LocalPair, in one step on the loop, and only those that a step which was read has written: streams need no other order.
Decides nothing else; a stage's sessions, its clock and the border of its steps are those of kvtransfer.driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from decode_service.decoder import Decoder
from engine.batch import Batch, StepOutput
from engine.device_thread import DeviceThread
from kvtransfer.actions import Action, ClosePull, SendBlock, ToPuller, ToRouter
from kvtransfer.driver import TICK_S, AheadRunner, Driver
from kvtransfer.transports.local import LocalPair
from prefill_service.prefiller import Prefiller
from shared_service.pace import Chunks, Pace
from wire.observer import Observer

_TO_PULLERS = (ToPuller, SendBlock, ClosePull)
_DECODE_SESSIONS = 1 << 62  # the decode stage numbers its sessions from here on: a number names its stage


class _Stage(Driver):
    """What its core asks for goes through the pair first; the rest comes back by `deliver`."""

    def __init__(
        self,
        shared: SharedDriver,
        core: Prefiller | Decoder,
        runner: Any,
        device: DeviceThread,
        ahead: AheadRunner | None,
        observer: Observer,
    ) -> None:
        super().__init__(core, runner.step, device, ahead, observer=observer)
        self._shared = shared

    @property
    def audited(self) -> bool:
        """Nothing was asked of it since its blocks were last accounted for."""
        return self._audited

    @audited.setter
    def audited(self, value: bool) -> None:
        self._audited = value

    async def steps(self) -> None:
        await self._engine()

    def apply(self, actions: Sequence[Action]) -> None:
        self._shared.apply(actions)

    def deliver(self, actions: Sequence[Action]) -> None:
        """Looks for work, too: what the other stage did may have made some."""
        super().apply(actions)


class _PrefillStage(_Stage):
    def _next_batch(self) -> Batch | None:
        shared = self._shared
        shared.prefiller.budget = shared.chunks.tokens(decoding=bool(shared.decoder.scheduler.running))
        return super()._next_batch()

    def _on_step(self, output: StepOutput) -> None:
        shared = self._shared
        tokens = sum(chunk.count for chunk in shared.prefiller.scheduler.flights[0])
        shared.chunks.prefilled(tokens, output.seconds)
        shared.chunk_read_at = time.monotonic()
        super()._on_step(output)


class _DecodeStage(_Stage):
    card_times: Sequence[tuple[int, int]] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._last_session = _DECODE_SESSIONS
        self._held: asyncio.TimerHandle | None = None

    def _next_batch(self) -> Batch | None:
        shared, now = self._shared, time.monotonic()
        if self._held is not None:
            self._held.cancel()
            self._held = None
        if seconds := shared.pace.hold(now, shared.computing):
            self._held = asyncio.get_running_loop().call_later(seconds, self._wake.set)
            return None
        batch = super()._next_batch()
        if batch is not None:
            shared.pace.launched(now)
        return batch

    def _on_step(self, output: StepOutput) -> None:
        shared, now, seconds = self._shared, time.monotonic(), output.seconds
        alone = not shared.computing and shared.chunk_read_at <= now - seconds
        if self.card_times:
            began, ended = self.card_times[-1]
            seconds = (ended - began) / 1e9
        shared.chunks.decoded(seconds)
        shared.pace.decoded(seconds, alone)
        super()._on_step(output)
        self.apply(shared.prefiller.admit(now))  # the step may have given blocks back


class SharedDriver:
    """`decodes` and then `prefills` give it its stages, over one pool: their runners share weights and cache."""

    def __init__(self, chunks: Chunks, pace: Pace) -> None:
        self.chunks = chunks
        self.pace = pace
        self.decoder: Decoder
        self.prefiller: Prefiller
        self.decode: _DecodeStage
        self.prefill: _PrefillStage
        self.chunk_read_at = 0.0
        self._pair: LocalPair

    def decodes(
        self,
        core: Decoder,
        runner: Any,
        device: DeviceThread,
        ahead: AheadRunner | None,
        observer: Observer,
        card_times: Sequence[tuple[int, int]] = (),
    ) -> Driver:
        """`card_times`: when steps that were read began and ended on the card, in nanoseconds, the newest last. To the
        host a step lasts longer, where others are launched before it."""
        self.decoder = core
        self.decode = _DecodeStage(self, core, runner, device, ahead, observer)
        self.decode.card_times = card_times
        return self.decode

    def prefills(
        self, core: Prefiller, runner: Any, device: DeviceThread, ahead: AheadRunner | None, observer: Observer
    ) -> Driver:
        self.prefiller = core
        self.prefill = _PrefillStage(self, core, runner, device, ahead, observer)
        self._pair = LocalPair(core, self.decoder)
        return self.prefill

    @property
    def stuck(self) -> bool:
        return self.prefill.stuck or self.decode.stuck

    @property
    def computing(self) -> bool:
        """The device has a chunk."""
        return bool(self.prefiller.scheduler.flights)

    def apply(self, actions: Sequence[Action]) -> None:
        prefill: list[Action] = []
        decode: list[Action] = []
        for action in self._pair.carry(actions, time.monotonic()):
            if isinstance(action, ToRouter):
                (prefill if action.session <= _DECODE_SESSIONS else decode).append(action)
            else:  # of pulls between this process and others
                (prefill if isinstance(action, _TO_PULLERS) else decode).append(action)
        self.prefill.deliver(prefill)
        self.decode.deliver(decode)

    async def run(self) -> None:
        """Runs until cancelled. Raises only for a broken invariant of a core, after which nothing can be trusted."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.prefill.steps())
            tasks.create_task(self.decode.steps())
            tasks.create_task(self._tick())

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
