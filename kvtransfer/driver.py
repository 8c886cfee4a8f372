"""Drives one worker's sans-IO core: sessions, pulls, the device and the clock go in, actions are carried out.

Decides nothing. Owns the map from session numbers to streams, the engine loop and its exception border, and the
ticker that keeps deadlines when there is no traffic. Runs on the event loop; only `step` runs on the device thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from engine.batch import Batch, StepOutput
from engine.device_thread import DeviceThread, ahead_loop, engine_loop
from engine.messages import RouterHello, WorkerLoad
from kvtransfer.actions import Action, ToRouter
from wire.logs import get_logger
from wire.observer import Observer
from wire.session import Outbound

log = get_logger("driver")

T = TypeVar("T")
TICK_S = 0.25
STUCK = "a step does not end"
STUCK_S = 30.0  # a step that takes longer is taken for one that does not end


class Core(Protocol):
    """A Prefiller or a Decoder."""

    sessions: dict[int, RouterHello]

    @property
    def idle(self) -> bool: ...
    def attach(self, session: int, hello: RouterHello, now: float) -> list[Action]: ...
    def detach(self, session: int, now: float) -> list[Action]: ...
    def on_command(self, session: int, command: Any, now: float) -> list[Action]: ...
    def next_batch(self, now: float) -> Batch | None: ...
    def on_step(self, output: StepOutput, now: float) -> list[Action]: ...
    def step_failed(self, facts: dict[str, str], now: float) -> list[Action]: ...
    def tick(self, now: float) -> list[Action]: ...
    def drain(self, grace: float, now: float) -> list[Action]: ...
    def load(self) -> WorkerLoad: ...
    def audit(self) -> None: ...


class AheadRunner(Protocol):
    """A runner that takes `depth` steps before the first is read. All of it runs on the device thread."""

    depth: int

    def submit(self, batch: Batch) -> Any: ...
    def collect(self, launched: Any) -> StepOutput: ...
    def abandon(self) -> None:
        """A step failed: waits for all that was launched, and forgets it."""


class StepFailed(Exception):
    """The runner raised. str() is the error id under which the traceback was logged."""


class Driver:
    """`carry` carries out every action that is not for a router; whoever makes the pull service sets it. `observer`
    hears all that the routers say and are told.

    With `ahead`, which is then the runner of `step`, as many steps are in flight as it takes.
    """

    def __init__(
        self,
        core: Core,
        step: Callable[[Batch], StepOutput],
        device: DeviceThread,
        ahead: AheadRunner | None = None,
        *,
        observer: Observer,
    ) -> None:
        self.core = core
        self._observer = observer
        self.carry: Callable[[Any], None] = _nowhere
        self._step_on_device = step
        self._device = device
        self._ahead = ahead
        self._outbounds: dict[int, Outbound[Any]] = {}
        self._last_session = 0
        self._wake = asyncio.Event()
        self._audited = True
        self._step_began: float | None = None  # of the step on the device

    @property
    def stuck(self) -> bool:
        """The engine has work and makes no step: whoever sends it more should know."""
        return self._step_began is not None and time.monotonic() - self._step_began > STUCK_S

    def apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if not isinstance(action, ToRouter):
                self.carry(action)
            elif (outbound := self._outbounds.get(action.session)) is not None:
                outbound.put(action.event)
                self._observer.said(action.session, action.event)
        self._wake.set()

    # ---- sessions -------------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """What one Attach stream reports to. Routers number their sessions on their own: here each gets a new one."""
        self._last_session += 1
        return Stream(self, self._last_session)

    def opened(self, number: int, hello: RouterHello, outbound: Outbound[Any]) -> None:
        self._outbounds[number] = outbound
        self.apply(self.core.attach(number, hello, time.monotonic()))
        for other in self._outbounds.keys() - self.core.sessions.keys():  # replaced by a newer one of the same router
            self._outbounds.pop(other).close()

    def commanded(self, number: int, command: Any) -> None:
        self._audited = False
        self._observer.commanded(number, command)
        self.apply(self.core.on_command(number, command, time.monotonic()))

    def closed(self, number: int) -> None:
        self._outbounds.pop(number, None)
        self._observer.closed(number)
        if number in self.core.sessions:
            self.apply(self.core.detach(number, time.monotonic()))

    # ---- the device and the clock ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled. Raises only for a broken invariant of the core, after which nothing can be trusted."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine())
            tasks.create_task(self._tick())

    async def _engine(self) -> None:
        while True:
            try:
                await self._loop()
            except StepFailed as failed:
                if self._ahead is not None:
                    await self._device.run(self._ahead.abandon)
                self.apply(self.core.step_failed({"error_id": str(failed)}, time.monotonic()))

    async def _loop(self) -> None:
        if (ahead := self._ahead) is None:
            await engine_loop(self._next_batch, self._step, self._on_step, self._wake)
            return

        def on_device(batch: Batch | None, oldest: Any) -> tuple[Any, StepOutput | None]:
            newest = None if batch is None else ahead.submit(batch)
            return newest, None if oldest is None else ahead.collect(oldest)

        async def turn(batch: Batch | None, oldest: Any) -> tuple[Any, StepOutput | None]:
            return await self._on_device(on_device, batch, oldest)

        await ahead_loop(self._next_batch, turn, self._on_step, self._wake, ahead.depth)

    def _next_batch(self) -> Batch | None:
        batch = self.core.next_batch(time.monotonic())
        if batch is not None:
            self._observer.launched(len(batch.rows), sum(max(1, len(row.tokens)) for row in batch.rows))
        return batch

    async def _step(self, batch: Batch) -> StepOutput:
        return await self._on_device(self._step_on_device, batch)

    async def _on_device(self, fn: Callable[..., T], batch: Batch | None, *arguments: Any) -> T:
        self._step_began = time.monotonic()
        try:
            return await self._device.run(fn, batch, *arguments)
        except Exception as error:
            # The border of one step: whatever a request made the engine do wrong ends the batch, not the worker.
            error_id = secrets.token_hex(4)
            log.exception("step_failed", error_id=error_id, rows=len(batch.rows) if batch else 0)
            raise StepFailed(error_id) from error
        finally:
            self._step_began = None

    def _on_step(self, output: StepOutput) -> None:
        self._observer.stepped(output.seconds)
        self.apply(self.core.on_step(output, time.monotonic()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.apply(self.core.tick(time.monotonic()))
            if self.core.idle and not self._audited:  # idle: every block has to be accounted for
                self.core.audit()
                self._audited = True

    async def drain(self, grace: float) -> None:
        """Returns when all work is done or handed back, at the latest a second after `grace`, with all of it sent."""
        now = time.monotonic()
        give_up = now + grace + 1.0
        self.apply(self.core.drain(grace, now))
        while not self.core.idle and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        for outbound in self._outbounds.values():
            outbound.close()  # what is queued is sent first


class Stream:
    """One Attach stream, as wire.session reports it. The router's own session number is not used as a key."""

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver = driver
        self._number = number

    def session_opened(self, hello: RouterHello, outbound: Outbound[Any]) -> None:
        self._driver.opened(self._number, hello, outbound)

    def session_command(self, session: int, command: Any) -> None:
        self._driver.commanded(self._number, command)

    def session_closed(self, session: int, outbound: Outbound[Any]) -> None:
        self._driver.closed(self._number)

    def load(self) -> WorkerLoad:
        return self._driver.core.load()


def _nowhere(action: Action) -> None:
    raise AssertionError(f"nobody carries out {action}")
