"""Late binding under promises: small pools, random requests and a random order of everything still end, all of them."""

from __future__ import annotations

import random

import pytest

from engine.messages import Heartbeat, Reason
from tests.decode_world import SIZE, Request, World

SEEDS = 240
CHUNKS = 6


class Storm:
    """One seed: a pool of 6 to 20 blocks and up to a dozen requests, each of which alone fits it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.blocks = rng.randint(6, 20)
        self.world = World(
            self.blocks,
            max_num_seqs=rng.choice([1, 2, 3, 8]),
            headroom=rng.choice([0, 0, 0, 2]),
            max_waiting=rng.choice([2, 64, 64]),
        )
        self.pending = [self._draw() for _ in range(rng.randint(3, 10))]
        self.prefix = [rng.randrange(900) for _ in range(self.blocks * SIZE)]
        self.tokens = sum(length + output for length, output, _, _ in self.pending)
        self.hung: dict[int, float] = {}  # pull -> when its stream ends at last
        self.flight = 0  # events that the step in flight still takes
        weights = {
            self.arrive: rng.choice([2.0, 20.0]),
            self.cancel: rng.choice([0.0, 0.3]),
            self.hang: rng.choice([0.0, 0.3]),
            self.credit: 8.0,
            self.pass_time: rng.choice([0.5, 2.0]),
            self.world.resume: 3.0,
            self.announce: rng.choice([5.0, 40.0]),
            self.deliver: rng.choice([30.0, 90.0]),
            self.compute: 60.0,
        }
        self.events, self.weights = list(weights), list(weights.values())

    def _draw(self) -> tuple[int, int, bool, int]:
        """Prompt length, output length, whether it starts with the common prefix, first credit."""
        rng, room = self.rng, self.blocks * SIZE
        length = rng.randint(1, rng.choice([room // 4, room // 2, room - 2]))
        output = rng.randint(2, max(2, min(room - length, rng.choice([8, room // 2, room]))))
        return length, output, rng.random() < 0.3, rng.choice([1 << 30, 1 << 30, 1, 3])

    def arrive(self) -> None:
        if not self.pending:
            return
        length, output, common, until = self.pending.pop()
        prompt = self.prefix[:length] if common else [self.rng.randrange(1000) for _ in range(length)]
        request = self.world.submit(prompt, output, until=until)
        request.submitted -= self.rng.choice([0.0, 0.0, 5.0])  # it has been at another worker before

    def one_event(self) -> None:
        self.world.now += 0.01
        (event,) = self.rng.choices(self.events, self.weights)
        (event if self._open() else self.arrive)()

    def cancel(self) -> None:
        if mine := self._open():
            self.world.cancel(self.rng.choice(mine))

    def credit(self) -> None:
        if mine := [request for request in self._open() if request.until < 1 << 30]:
            request = self.rng.choice(mine)
            self.world.credit(request, len(request.log) + self.rng.randint(1, 12))

    def announce(self) -> None:
        prefills = self.world.owner.prefills
        if filling := [ticket for ticket, job in prefills.items() if job.done < len(job.blocks)]:
            self.world.advance(self.rng.choice(filling))

    def deliver(self) -> None:
        if ready := [pull for pull, link in self.world.links.items() if link.ready()]:
            self.world.deliver(self.rng.choice(ready))

    def compute(self) -> None:
        """A step is launched, and lands after a few other events."""
        if self.world.batch is None:
            if self.world.launch():
                self.flight = self.rng.choice([0, 0, 1, 3])
        elif self.flight > 0:
            self.flight -= 1
        else:
            self.world.land()

    def _open(self) -> list[Request]:
        return [request for request in self.world.requests.values() if not request.over]

    def hang(self) -> None:
        if not self.world.links:
            return
        pull = self.rng.choice(list(self.world.links))
        self.world.links[pull].hung = True
        self.hung.setdefault(pull, self.world.now + self.rng.choice([1.0, 15.0]))

    def pass_time(self) -> None:
        world = self.world
        world.now += 2.0
        for pull, link in list(world.links.items()):
            if not link.hung:
                world.apply(world.core.pull_event(pull, Heartbeat(0), world.now))
        for pull, end in list(self.hung.items()):
            if world.now >= end and pull in world.links:
                world.links[pull].hung = False
                world.links[pull].closing = True
                world.links[pull].to_puller.clear()
                del self.hung[pull]
        world.apply(world.core.tick(world.now))

    def run(self) -> None:
        limit = 4000 + 200 * self.tokens
        for _ in range(limit):
            before = self.world.changes
            self.one_event()
            if self.world.changes != before:
                self.world.audit()
            if not self.pending and not self._open():
                break
        stuck = [(request.id, len(request.log), request.reasons) for request in self._open()]
        assert not stuck and not self.pending, f"not over after {limit} events: {stuck}"
        self.world.now += 100.0
        while self.world.links or self.world.batch is not None:
            self.pass_time()
            for pull in list(self.world.links):
                self.world.deliver(pull)
            self.world.land()
        for request in self.world.requests.values():
            self.world.check(request)
        self.world.idle()


@pytest.mark.parametrize("part", range(CHUNKS))
def test_nothing_deadlocks_starves_or_leaks_in_a_small_pool(part: int) -> None:
    for seed in range(part, SEEDS, CHUNKS):
        storm = Storm(seed)
        try:
            storm.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        for request in storm.world.requests.values():
            # Each attempt that was preempted had brought a token: its prefill's, at least.
            preempted = request.reasons.count(Reason.OUT_OF_BLOCKS)
            assert preempted <= len(request.log), f"seed {seed}: request {request.id} was preempted {preempted} times"
