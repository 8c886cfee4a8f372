"""The two threads of one owner's copies in the CPU's memory: the one that has the work, and one that lends it a hand.

Owns the second thread, and how far both stand behind the threads that compute: a landing may take a little longer, a
decode step that runs meanwhile must not. Where a core has nothing else to do both take the next item until none is
left, and the end waits for both. What is done to a block is the caller's function, which must release the
interpreter, as numpy's copies, xxhash and NIXL's READs do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

ALONE = 2  # items that are not worth waking anybody
WAITED = 0.5  # of its time, by a second thread that had no core: more, and all have something else to do
ALONE_S = 0.25  # how long nobody is woken then
NICE = 5  # how far these threads stand behind others: a quarter of a core where all cores compute
_LIBC = ctypes.CDLL(None)
_LAST = 19  # nobody stands further behind
_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 20


def behind() -> int:
    """The niceness of a thread that gives way to the calling one."""
    return min(_LAST, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + NICE)


def give_way(niceness: int) -> None:
    """The calling thread alone, as Linux has it. Nobody may come forward again."""
    me = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, me, max(niceness, os.getpriority(os.PRIO_PROCESS, me)))


def stand_back() -> None:
    """The whole process gives way, to a router and clients on the same cores: everything waits for those. It may not
    come forward again. Threads and helpers that it makes from now on stand where their makers do, or behind.

    Where sessions have their own share of the cores (sched(7), "the autogroup feature"), Linux weighs threads only
    among those of their session. So a process that leads its session, as each program of a deployment does, has the
    session stand back too; in somebody else's it leaves the others where they are.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, min(_LAST, os.getpriority(os.PRIO_PROCESS, thread) + NICE))
    if os.getsid(0) == os.getpid() and _AUTOGROUP.exists() and (standing := _AUTOGROUP.read_text()):
        niceness = min(_LAST, int(standing.split()[-1]) + NICE)  # "/autogroup-42 nice 0"
        for _ in range(_TRIES):
            try:
                _AUTOGROUP.write_text(str(niceness))
                break
            except BlockingIOError:  # the kernel lets one process of the machine do so in a tenth of a second
                time.sleep(random.uniform(0.05, 0.15))


class Hands:
    """Made on a thread that computes, or stands where those do."""

    def __init__(self) -> None:
        self._niceness = behind()
        self._helper = ThreadPoolExecutor(1, "hands", initializer=self._introduce)
        self._helper_id: int | None = None
        self._known: int | None = None  # the thread that has the work
        self._alone_until = 0.0  # monotonic

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` of every item, in order. Returns when neither thread is at any of them; raises what `work` raised."""
        todo = deque(enumerate(items))
        results: dict[int, Result] = {}

        def some() -> None:
            try:
                for number, item in taken(todo):
                    results[number] = work(item)
            except BaseException:
                todo.clear()
                raise

        self.both(some, len(items))
        return [results[number] for number in range(len(items))]

    def both(self, some: Callable[[], None], items: int) -> None:
        """`some` on both threads, which take as many `items` from one list; on this one alone where two do not pay.

        Returns when neither is at it. What it raises on one of them does not end it on the other.
        """
        self._calm()
        if items <= ALONE or time.monotonic() < self._alone_until:
            some()
            return
        self._part()
        helping = self._helper.submit(self._help, some)
        try:
            some()
        finally:
            if not helping.cancel():  # it has begun
                helping.result()

    def _help(self, some: Callable[[], None]) -> None:
        began, waited = time.monotonic(), _waited()
        some()
        now = time.monotonic()
        if _waited() - waited > WAITED * (now - began):
            self._alone_until = now + ALONE_S

    def meet(self, greet: Callable[[], object]) -> None:
        """Once on each thread, this one first."""
        greet()
        self._helper.submit(greet).result()

    def _calm(self) -> None:
        """The calling thread, which does nothing but copy, gives way too."""
        if self._known != threading.get_native_id():
            self._known = threading.get_native_id()
            give_way(self._niceness)

    def close(self) -> None:
        self._helper.shutdown(wait=False)

    def _introduce(self) -> None:
        give_way(self._niceness)
        self._helper_id = threading.get_native_id()

    def _part(self) -> None:
        """The helper leaves the calling thread's core: some schedulers, of virtual machines above all, fill one core
        before they use the next, and there it would only take turns with whom it should help."""
        others = os.sched_getaffinity(0) - {_LIBC.sched_getcpu()}
        if self._helper_id is not None and others:
            with contextlib.suppress(OSError):  # the process may have been given other cores meanwhile
                os.sched_setaffinity(self._helper_id, others)


def taken(todo: deque[Item]) -> Iterator[Item]:
    """What this thread gets of a list that another one takes from too."""
    while True:
        try:
            item = todo.popleft()
        except IndexError:
            return
        yield item


def _waited() -> float:
    """Seconds that this thread could have run and had no core. Where the kernel keeps no count of them: none."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0
