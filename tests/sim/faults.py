"""What goes wrong in a run, drawn from its seed: deaths, stops, partitions, breaks, slow and corrupt copies.

Faults stop at `until`; a worker that died for good stays dead, and one of each role always lives. Each fault is
counted where it took effect, so that a run can show that it happened.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from router.workers import Role
from tests.sim.network import Process, Stream

if TYPE_CHECKING:
    from tests.sim.workers import WorkerProcess
    from tests.sim.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.calm = False  # nothing goes wrong by itself
        self.until = self.rng.choice((2.0, 6.0, 15.0))
        self.burst = self.rng.choice((0.05, 0.3, 1.0))  # requests arrive in this part of the faulty time
        self.done: Counter[str] = Counter()
        self.corrupt = self.rng.choice((0.0, 0.0, 0.02, 0.1))
        self.slow = self.rng.choice((0.0, 0.0, 0.05, 0.3))
        self.fragile = self.rng.choice((0.0, 0.0, 0.02, 0.1))
        self.hung = self.rng.choice((0.0, 0.0, 0.02, 0.1))

    def plan(self) -> None:
        if self.calm:
            return
        kinds = [
            self.kill,
            self.kill,
            self.bury,
            self.stop,
            self.partition,
            self.partition,
            self.cut,
            self.cut,
            self.drain,
            self.kill_router,
        ]
        for _ in range(self.rng.choice((0, 2, 4, 8, 12))):
            fault = self.rng.choice(kinds)
            self.world.clock.at(self.rng.random() * self.until, fault)

    # ---- copies ---------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return not self.calm and self.world.clock.now < self.until

    def bytes_of(self, data: bytes) -> bytes:
        if not self.active or self.rng.random() >= self.corrupt:
            return data
        self.done["corrupt"] += 1
        place = self.rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]

    def write_seconds(self) -> float:
        usual = self.rng.random() * self.world.tuning.copy_seconds
        if self.active and self.rng.random() < self.hung:
            self.done["hung copy"] += 1
            return usual + self.rng.uniform(2.0, 12.0)
        if self.active and self.rng.random() < self.slow:
            return usual * self.rng.uniform(2, 30)
        return usual

    def may_break(self, stream: Stream) -> None:
        """A Pull that breaks just as its puller has spoken: the last word may be lost."""
        if self.active and self.rng.random() < self.fragile:
            self.done["pull break"] += 1
            stream.cut(self.rng.random() * 0.1, self.rng.random() * 0.1)

    # ---- processes and links --------------------------------------------------------------------------------

    def _worker(self) -> WorkerProcess:
        return self.rng.choice(self.world.workers)

    def _others_live(self, worker: WorkerProcess) -> bool:
        return any(w.role is worker.role and w is not worker and not w.forever_dead for w in self.world.workers)

    def kill(self) -> None:
        worker = self._worker()
        if worker.alive:
            self.crash(worker)

    def crash(self, worker: WorkerProcess) -> None:
        self._note("kill", worker)
        self.world.network.kill(worker)
        self.world.clock.at(self.world.clock.now + self.rng.choice((0.01, 0.5, 3.0)), lambda: self._restart(worker))

    def _restart(self, worker: WorkerProcess) -> None:
        if not worker.alive and not worker.forever_dead:
            self._note("restart", worker)
            worker.start()

    def kill_router(self) -> None:
        router = self.world.router
        if router.alive:
            self._note("router death", router)
            self.world.network.kill(router)
            self.world.clock.at(self.world.clock.now + self.rng.choice((0.1, 2.0)), self.world.restart_router)

    def bury(self) -> None:
        worker = self._worker()
        if worker.alive and self._others_live(worker):
            self._note("death for good", worker)
            worker.forever_dead = True
            self.world.network.kill(worker)

    def stop(self) -> None:
        process = self.rng.choice((self.world.router, *self.world.workers))
        if process.alive and not process.stopped:
            self._note("stop", process)
            self.world.network.stop(process, self.rng.choice((0.2, 1.0, 2.0, 6.0)))

    def partition(self) -> None:
        near, far = self._pair()
        self._note(f"partition from {far.name}", near)
        self.world.network.block(near, far, self.rng.choice((0.2, 1.0, 4.0, 8.0)))

    def _pair(self) -> tuple[Process, Process]:
        prefill = [w for w in self.world.workers if w.role is Role.PREFILL]
        decode = [w for w in self.world.workers if w.role is Role.DECODE]
        if self.rng.random() < 0.5:
            return self.rng.choice(decode), self.rng.choice(prefill)
        return self.world.router, self._worker()

    def cut(self) -> None:
        streams = list(self.world.network.streams.values())
        if streams:
            stream = self.rng.choice(streams)
            self._note(f"break to {stream.ends[1].process.name}", stream.ends[0].process)
            stream.cut(self.rng.random(), self.rng.random())

    def drain(self) -> None:
        worker = self._worker()
        if worker.alive and not worker.stopped and self._others_live(worker):
            grace = self.rng.choice((0.1, 1.0, 5.0))
            self._note("SIGTERM", worker)
            worker.act(worker.core.drain(grace, self.world.clock.now))
            life = worker.life
            self.world.clock.at(self.world.clock.now + grace + 0.5, lambda: self._exit(worker, life))

    def _exit(self, worker: WorkerProcess, life: int) -> None:
        if worker.life == life and worker.alive:
            self.world.network.kill(worker)
            self.world.clock.at(self.world.clock.now + 0.5, lambda: self._restart(worker))

    def _note(self, kind: str, process: Process) -> None:
        self.done[kind.split(" to ")[0].split(" from ")[0]] += 1
        self.world.say(process.name, kind)
