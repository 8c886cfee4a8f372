"""The threads that copy: every item is done once, errors come through, and they give way however low the worker is."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtransfer.transports import hands
from kvtransfer.transports.hands import NICE, Hands

waited = hands._waited  # by the kernel's count; the tests have their own


def on_a_thread_of_its_own(work: Callable[[], object]) -> None:
    """Niceness is a thread's, and cannot be taken back."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hands, "_waited", lambda: 0.0)


@pytest.mark.parametrize("niceness", [0, 10, 18])
def test_both_threads_stand_behind_those_that_compute_even_in_a_worker_that_was_started_with_nice(
    niceness: int,
) -> None:
    def work() -> None:
        me = threading.get_native_id()
        before = max(niceness, os.getpriority(os.PRIO_PROCESS, me))
        os.setpriority(os.PRIO_PROCESS, me, before)
        pair = Hands()
        both = threading.Barrier(2, timeout=20)

        def look(item: int) -> int:
            if item < 2:
                both.wait()  # each of the two has one
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        assert set(pair.each(look, range(20))) == {min(19, before + NICE)}
        pair.close()

    on_a_thread_of_its_own(work)


def test_every_item_is_done_once_and_in_order() -> None:
    def work() -> None:
        pair, done = Hands(), list[int]()

        def double(item: int) -> int:
            done.append(item)
            return 2 * item

        for count in (0, 1, 2, 3, 50):
            done.clear()
            assert pair.each(double, range(count)) == [2 * item for item in range(count)]
            assert sorted(done) == list(range(count))
        pair.close()

    on_a_thread_of_its_own(work)


def test_what_goes_wrong_with_one_item_is_raised_when_neither_thread_is_at_any() -> None:
    def work() -> None:
        pair, at_work, done = Hands(), list[int](), list[int]()

        def fail(item: int) -> int:
            at_work.append(item)
            try:
                if item == 3:
                    raise ValueError("item 3")
                time.sleep(0.0005)
                done.append(item)
                return item
            finally:
                at_work.remove(item)

        with pytest.raises(ValueError, match="item 3"):
            pair.each(fail, range(1000))
        assert at_work == [] and len(done) < 500, "and the other thread takes no more"
        pair.close()

    on_a_thread_of_its_own(work)


def test_nobody_helps_for_a_while_where_the_second_thread_had_to_wait_for_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hands, "ALONE_S", 0.2)

    def work() -> None:
        pair, me = Hands(), threading.get_native_id()
        both = threading.Barrier(2)

        def together(item: int) -> int:
            if item < 2:
                both.wait(timeout=20)
            return threading.get_native_id()

        def alone(item: int) -> int:
            time.sleep(0.002)  # long enough for a second thread to take one
            return threading.get_native_id()

        assert len(set(pair.each(together, range(20)))) == 2
        monkeypatch.setattr(hands, "_waited", time.monotonic)  # all the time
        assert len(set(pair.each(together, range(20)))) == 2
        monkeypatch.setattr(hands, "_waited", lambda: 0.0)
        assert set(pair.each(alone, range(20))) == {me}
        time.sleep(0.25)
        assert len(set(pair.each(together, range(20)))) == 2
        pair.close()

    on_a_thread_of_its_own(work)


def test_a_thread_that_others_keep_off_its_core_has_waited() -> None:
    def work() -> None:
        os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
        ended = threading.Event()
        rivals = [threading.Thread(target=_hash_until, args=(ended,)) for _ in range(3)]  # on the same core
        for rival in rivals:
            rival.start()
        before = waited()
        _hash_until(ended, 0.3)
        seconds = waited() - before
        ended.set()
        for rival in rivals:
            rival.join()
        assert seconds > 0.1

    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel keeps no count")
    on_a_thread_of_its_own(work)


def _hash_until(ended: threading.Event, seconds: float = 20.0) -> None:
    """Keeps a core busy without the interpreter."""
    data, give_up = bytes(1 << 22), time.monotonic() + seconds
    while not ended.is_set() and time.monotonic() < give_up:
        hashlib.sha256(data).digest()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_the_helper_keeps_off_the_core_of_the_one_it_helps() -> None:
    """Where a scheduler fills one core first both would take turns on it while another is idle."""

    def work() -> None:
        pair, cores = Hands(), os.sched_getaffinity(0)
        both = threading.Barrier(2, timeout=20)

        def where(item: int) -> frozenset[int]:
            if item < 2:
                both.wait()
            return frozenset(os.sched_getaffinity(0))

        pair.each(where, range(20))  # the helper is there
        here, elsewhere = sorted(set(pair.each(where, range(20))), key=len, reverse=True)
        assert here == cores and len(cores - elsewhere) == 1
        pair.close()

    on_a_thread_of_its_own(work)
