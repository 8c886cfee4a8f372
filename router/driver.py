"""Runs the Dispatcher on the event loop: brings it events and the time, and carries out what it answers.

Owns the clock, the ticks and the mailbox of every call. ToWorker goes to the sessions, Emit and End to the call
that waits for them, in order and without waiting: a call's queue is bounded by the credit that its client has
given. With many streams open, tokens that follow each other closely reach their call together: a message to a client
costs ten times what a token costs. Decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from engine.messages import DecodeEvent, PrefillEvent, WorkerHello
from engine.types import FinishReason
from router.actions import Action, Emit, End, Outcome, RouterRequest, Times, ToWorker
from router.dispatch import Dispatcher
from router.workers import Role

TICK_S = 0.05

# Messages to clients take about 60 us of CPU each. If every stream waits this much for each stream that is open, they
# take a tenth of a core together, however many there are, until a token would be late.
HOLD_PER_CALL_S = 0.0006
MOST_HOLD_S = 0.066
MOST_HELD = 16  # events; far less than a client's window, so that holding them never stops a request
# Streams that fall due with the same step are read one after another, and a pause lets the crowds of several steps
# become one. Whoever was read later than this holds its next tokens for less, and so leaves the crowd.
MOST_LATE_S = 0.016

HANDED_BACK = Outcome(
    FinishReason.ERROR, 0, 0, 0, Times(), None, "UNAVAILABLE",
    "the router is shutting down: resume elsewhere with the tokens received", None, {"resumable": "true"},
)  # fmt: skip


class Call:
    """The requests of one RPC, one for each choice, and the events that wait to be read. Close it, always."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._requests: list[int] = []
        self._open: set[int] = set()  # choices without their End
        self._events: list[tuple[int, Emit | End]] = []
        self._loop = asyncio.get_running_loop()
        self._due = False  # the events are to be read now
        self._waiter: asyncio.Future[None] | None = None  # whoever reads them
        self._timer: asyncio.TimerHandle | None = None  # makes them due, once those that are held have waited enough
        self._due_at = 0.0  # when that timer should make them due
        self._late = 0.0  # how much later than that they were read, the last time
        self._read_at = -MOST_HOLD_S

    @property
    def over(self) -> bool:
        """Every choice has ended and everything was read."""
        return not self._open and not self._events

    def submit(self, request: RouterRequest) -> None:
        """The next choice. Raises admission.Rejected; the choices before it are cancelled by close()."""
        self._open.add(len(self._requests))
        try:
            self._driver.submit(self, len(self._requests), request)
        except BaseException:
            self._open.discard(len(self._requests))
            raise

    def submitted(self, request: int) -> None:
        self._requests.append(request)

    def seed(self, choice: int) -> int:
        return self._driver.dispatcher.seed(self._requests[choice]) or 0

    def put(self, choice: int, event: Emit | End) -> None:
        """An end is told at once, and so is a token that comes some time after those before it."""
        self._events.append((choice, event))
        if isinstance(event, End):
            self._open.discard(choice)
            self._wake()
        elif self._timer is None and not self._due:
            now, hold = self._loop.time(), self._driver.hold
            if now - self._read_at >= hold:
                self._wake()
            else:
                self._due_at = now + hold - (self._late if self._late > MOST_LATE_S else 0.0)
                self._timer = self._loop.call_at(self._due_at, self._wake)
        elif len(self._events) >= MOST_HELD:
            self._wake()

    async def events(self) -> Sequence[tuple[int, Emit | End]]:
        """Everything that has arrived, at least one event. What one engine step said is never split."""
        if not self._due:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._due = False
        self._read_at = self._loop.time()
        self._late = self._read_at - self._due_at if self._timer is not None else 0.0
        self._stop_timer()
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        self._due = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def consumed(self, choice: int, index: int) -> None:
        """The client has taken this choice's tokens below `index`."""
        self._driver.consumed(self._requests[choice], index)

    def stop(self, choice: int) -> None:
        """A stop string ended this choice."""
        self._driver.stop(self._requests[choice])

    def close(self) -> None:
        """Cancels whatever still runs, in this turn of the loop."""
        self._stop_timer()
        self._driver.forget(self._requests)


class Driver:
    """`send` puts a command on the session to that worker."""

    def __init__(
        self, dispatcher: Dispatcher, send: Callable[[ToWorker], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.dispatcher = dispatcher
        self._send = send
        self._clock = clock
        self._calls: dict[int, tuple[Call, int]] = {}

    # ---- calls ----------------------------------------------------------------------------------------------

    @property
    def hold(self) -> float:
        """Seconds that a stream's tokens wait for those behind them."""
        return min(MOST_HOLD_S, HOLD_PER_CALL_S * len(self._calls))

    def submit(self, call: Call, choice: int, request: RouterRequest) -> None:
        number, actions = self.dispatcher.submit(request, self._clock())
        self._calls[number] = (call, choice)
        call.submitted(number)
        self._perform(actions)

    def consumed(self, request: int, index: int) -> None:
        self._perform(self.dispatcher.consumed(request, index, self._clock()))

    def stop(self, request: int) -> None:
        self._perform(self.dispatcher.stop(request, self._clock()))

    def forget(self, requests: Sequence[int]) -> None:
        for request in requests:
            if self._calls.pop(request, None) is not None:
                self._perform(self.dispatcher.cancel(request, self._clock()))

    def hand_back(self) -> None:
        """Ends what still runs, so that each client may resume it elsewhere with the tokens that it holds."""
        for number, (call, choice) in list(self._calls.items()):
            call.put(choice, End(number, HANDED_BACK))
            self.forget([number])

    # ---- workers --------------------------------------------------------------------------------------------

    def worker_up(self, address: str, role: Role, hello: WorkerHello) -> None:
        self._perform(self.dispatcher.worker_up(address, role, hello, self._clock()))

    def worker_down(self, address: str, role: Role) -> None:
        self._perform(self.dispatcher.worker_down(address, role, self._clock()))

    def worker_event(self, address: str, role: Role, event: PrefillEvent | DecodeEvent) -> None:
        self._perform(self.dispatcher.on_event(address, role, event, self._clock()))

    # ---- time -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks until cancelled."""
        while True:
            self._perform(self.dispatcher.tick(self._clock()))
            await asyncio.sleep(TICK_S)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, ToWorker):
                self._send(action)
            elif (waiting := self._calls.get(action.request)) is not None:
                call, choice = waiting
                if isinstance(action, End):
                    del self._calls[action.request]
                call.put(choice, action)
