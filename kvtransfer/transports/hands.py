"""The two threads of one owner's copies in the CPU's memory: the one that has the work, and one that lends it a hand.

Owns the second thread, and how far both stand behind the threads that compute: a landing may take a little longer, a
decode step that runs meanwhile must not. Where a core has nothing else to do both take the next item until none is
left, and the end waits for both. What is done to a block is the caller's function, which must release the interpreter,
as numpy's copies and xxhash do.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Item = TypeVar("Item")
Result = TypeVar("Result")

ALONE = 2  # items that are not worth waking anybody
NICE = 5  # how far these threads stand behind others: a quarter of a core where all cores compute
_LAST = 19  # nobody stands further behind


def behind() -> int:
    """The niceness of a thread that gives way to the calling one."""
    return min(_LAST, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + NICE)


def give_way(niceness: int) -> None:
    """The calling thread alone, as Linux has it. Nobody may come forward again."""
    me = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, me, max(niceness, os.getpriority(os.PRIO_PROCESS, me)))


class Hands:
    """Made on a thread that computes, or stands where those do."""

    def __init__(self) -> None:
        self._niceness = behind()
        self._helper = ThreadPoolExecutor(1, "hands", initializer=give_way, initargs=(self._niceness,))
        self._cores = len(os.sched_getaffinity(0))
        self._known: int | None = None  # the thread that has the work

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` of every item, in order. Returns when neither thread is at any of them; raises what `work` raised."""
        self.calm()
        if len(items) <= ALONE or self._all_busy():
            return [work(item) for item in items]
        todo = deque(enumerate(items))
        results: dict[int, Result] = {}

        def some() -> None:
            while todo:
                try:
                    number, item = todo.popleft()
                except IndexError:  # the other one was quicker
                    return
                results[number] = work(item)

        helping = self._helper.submit(some)
        try:
            some()
        finally:
            todo.clear()
            if not helping.cancel():  # it has begun
                helping.result()
        return [results[number] for number in range(len(items))]

    def begin(self, work: Callable[Given, Result], *given: Given.args, **more: Given.kwargs) -> Future[Result]:
        """On the helper alone, after what it was given before; here, if it would have to wait for a core."""
        if not self._all_busy():
            return self._helper.submit(work, *given, **more)
        done: Future[Result] = Future()
        done.set_result(work(*given, **more))
        return done

    def _all_busy(self) -> bool:
        return os.getloadavg()[0] > self._cores  # of the last minute: good enough for a choice that costs little

    def calm(self) -> None:
        """The calling thread, which does nothing else, gives way too."""
        if self._known != threading.get_native_id():
            self._known = threading.get_native_id()
            give_way(self._niceness)

    def close(self) -> None:
        self._helper.shutdown(wait=False)
