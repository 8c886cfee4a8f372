"""Virtual time, processes that can die or stop, and streams between them that break only as a whole.

A stream keeps order and loses nothing while it lives, as a gRPC stream does; a break loses what is under way, and
each end learns of it on its own. With `loss` set, single messages vanish or come twice: no real transport does
that, so only safety and the deadlines can be expected of anybody then.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

Step = Callable[[], None]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Step]] = []
        self._count = 0

    def at(self, time: float, step: Step) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, step))

    def run_next(self) -> None:
        self.now, _, step = heapq.heappop(self._heap)
        step()


class Process:
    """One process: what it was about to do vanishes with its life and waits while it is stopped."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.life = 0
        self.alive = False
        self.stopped = False
        self._backlog: deque[tuple[int, Step]] = deque()

    def post(self, delay: float, step: Step) -> None:
        life = self.life
        self.clock.at(self.clock.now + delay, lambda: self.run(life, step))

    def run(self, life: int, step: Step) -> None:
        if life != self.life or not self.alive:
            return
        if self.stopped:
            self._backlog.append((life, step))
        else:
            step()

    def born(self) -> None:
        self.life += 1
        self.alive = True
        self.stopped = False

    def die(self) -> None:
        self.life += 1
        self.alive = False
        self.stopped = False
        self._backlog.clear()

    def resume(self) -> None:
        self.stopped = False
        backlog, self._backlog = self._backlog, deque()
        for life, step in backlog:
            self.run(life, step)


class End:
    """One end of a stream, in the hands of `process`."""

    def __init__(self, process: Process, on_message: Callable[[Any], None], on_close: Step) -> None:
        self.process = process
        self.life = process.life
        self.on_message = on_message
        self.on_close = on_close
        self.open = True
        self.last = 0.0  # when the latest message arrives
        self.held: list[Any] = []  # arrived while the link was blocked


class Stream:
    def __init__(self, network: Network, number: int, near: End, far: End) -> None:
        self.network = network
        self.number = number
        self.ends = (near, far)
        self.broken = False

    def send(self, side: int, message: Any) -> None:
        """From `side` to the other end; silently lost if the stream is over, as a write to a dead socket is."""
        if not self.ends[side].open or self.broken:
            return
        for _ in range(self.network.copies()):
            self._deliver_later(self.ends[1 - side], message)

    def close(self, side: int) -> None:
        """An orderly end: what was sent before arrives first. The closing end hears nothing more."""
        end = self.ends[side]
        if not end.open:
            return
        end.open = False
        if not self.broken:
            self._deliver_later(self.ends[1 - side], _CLOSE)

    def cut(self, near: float, far: float) -> None:
        """Breaks now; each end that lives learns of it after its own delay."""
        if self.broken:
            return
        self.broken = True
        self.network.streams.pop(self.number, None)
        for end, delay in zip(self.ends, (near, far), strict=True):
            life = end.life
            self.network.clock.at(
                self.network.clock.now + delay,
                lambda end=end, life=life: end.process.run(life, lambda: self._over(end)),
            )

    @property
    def blocked(self) -> bool:
        return self.network.blocked(self.ends[0].process, self.ends[1].process)

    def unblock(self) -> None:
        for end in self.ends:
            held, end.held = end.held, []
            for message in held:  # at once: what is still on its way was sent later
                self._arrive(end, end.life, message)

    def _deliver_later(self, end: End, message: Any) -> None:
        clock = self.network.clock
        end.last = max(end.last, clock.now + self.network.delay())
        life = end.life
        clock.at(end.last, lambda: self._arrive(end, life, message))

    def _arrive(self, end: End, life: int, message: Any) -> None:
        if self.broken:
            return
        if self.blocked or end.held:
            end.held.append(message)
            return
        end.process.run(life, lambda: self._hand_over(end, message))

    def _hand_over(self, end: End, message: Any) -> None:
        if not end.open:
            return
        if message is _CLOSE:
            self.network.streams.pop(self.number, None)
            self._over(end)
        elif not self.broken:
            end.on_message(message)

    def _over(self, end: End) -> None:
        if end.open:
            end.open = False
            end.on_close()


class _Close:
    pass


_CLOSE = _Close()


class Network:
    """Links between processes: delays, blocks, and the verdict of silence on every stream that crosses a block."""

    def __init__(self, clock: Clock, rng: random.Random, max_delay: float, silence: float, loss: float) -> None:
        self.clock = clock
        self.rng = rng
        self.max_delay = max_delay
        self.silence = silence
        self.loss = loss
        self.streams: dict[int, Stream] = {}  # by number, oldest first: a seed replays
        self._opened = 0
        self._blocks: dict[frozenset[str], float] = {}  # pair -> until when

    def delay(self) -> float:
        return self.rng.random() * self.max_delay

    def copies(self) -> int:
        if not self.loss or self.rng.random() >= self.loss:
            return 1
        return self.rng.choice((0, 2))

    def open(self, near: End, far: End) -> Stream:
        self._opened += 1
        stream = self.streams[self._opened] = Stream(self, self._opened, near, far)
        return stream

    def blocked(self, one: Process, other: Process) -> bool:
        return self._blocks.get(frozenset((one.name, other.name)), 0.0) > self.clock.now

    def block(self, one: Process, other: Process, seconds: float) -> None:
        """Nothing passes for so long. Streams that are silent too long break, at each end by its own clock."""
        pair = frozenset((one.name, other.name))
        self._blocks[pair] = max(self._blocks.get(pair, 0.0), self.clock.now + seconds)
        self.clock.at(self._blocks[pair], lambda: self._heal(pair))
        if seconds > self.silence:
            self.clock.at(self.clock.now + self.silence, lambda: self._judge(pair))

    def _judge(self, pair: frozenset[str]) -> None:
        for stream in self._between(pair):
            if stream.blocked:
                stream.cut(self.rng.random(), self.rng.random())

    def _heal(self, pair: frozenset[str]) -> None:
        if self._blocks.get(pair, 0.0) > self.clock.now:
            return
        for stream in self._between(pair):
            stream.unblock()

    def _between(self, pair: frozenset[str]) -> list[Stream]:
        return [s for s in self.streams.values() if {s.ends[0].process.name, s.ends[1].process.name} == pair]

    def of(self, process: Process) -> list[Stream]:
        return [s for s in self.streams.values() if process in (s.ends[0].process, s.ends[1].process)]

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP and SIGCONT. A stop longer than the silence breaks its streams; it finds out when it goes on."""
        if not process.alive or process.stopped:
            return
        process.stopped = True
        life = process.life
        if seconds > self.silence:
            self.clock.at(self.clock.now + self.silence, lambda: self._judge_stopped(process, life))
        self.clock.at(self.clock.now + seconds, lambda: process.resume() if process.life == life else None)

    def _judge_stopped(self, process: Process, life: int) -> None:
        if process.life == life and process.stopped:
            for stream in self.of(process):
                stream.cut(self.rng.random() * 0.5, self.rng.random() * 0.5)

    def kill(self, process: Process) -> None:
        """kill -9, or with the host: its peers hear at once or only through its silence."""
        process.die()
        loud = self.rng.random() < 0.7
        for stream in self.of(process):
            delay = self.rng.random() * 0.05 if loud else self.silence + self.rng.random() * 0.2
            stream.cut(delay, delay)
