"""Late binding under promises: small pools, random requests and a random order of everything still end, all of them."""

from __future__ import annotations

import random

import pytest

from engine.messages import Heartbeat, Reason
from tests.decode_world import SIZE, Request, World

SEEDS = 300
CHUNKS = 6


class Storm:
    """One seed: a pool of 6 to 20 blocks and up to a dozen requests, each of which alone fits it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.blocks = rng.randint(6, 20)
        self.world = World(
            self.blocks,
            max_num_seqs=rng.choice([1, 2, 3, 8]),
            headroom=rng.choice([0, 0, 1, 2]),
            max_waiting=rng.choice([2, 4, 64]),
        )
        self.pending = [self._draw() for _ in range(rng.randint(3, 12))]
        self.prefix = [rng.randrange(900) for _ in range(self.blocks * SIZE)]
        self.tokens = sum(length + output for length, output, _, _ in self.pending)
        self.hung: dict[int, float] = {}  # pull -> when its stream ends at last
        self.flight = 0  # random events that the step in flight still takes

    def _draw(self) -> tuple[int, int, bool, int]:
        """Prompt length, output length, whether it starts with the common prefix, first credit."""
        rng, room = self.rng, self.blocks * SIZE
        length = rng.randint(1, rng.choice([room // 4, room // 2, room - 2]))
        output = rng.randint(2, max(2, min(room - length, rng.choice([4, 16, room]))))
        return length, output, rng.random() < 0.3, rng.choice([1 << 30, 1 << 30, 1, 3])

    def arrive(self) -> None:
        length, output, common, until = self.pending.pop()
        prompt = self.prefix[:length] if common else [self.rng.randrange(1000) for _ in range(length)]
        request = self.world.submit(prompt, output, until=until)
        request.submitted -= self.rng.choice([0.0, 0.0, 5.0])  # it has been at another worker before

    def one_event(self) -> None:
        rng, world = self.rng, self.world
        world.now += 0.01
        roll = rng.random()
        if roll < 0.05 and self.pending:
            self.arrive()
        elif roll < 0.06 and (mine := self._open()) and rng.random() < 0.3:
            world.cancel(rng.choice(mine))
        elif roll < 0.07 and world.links and rng.random() < 0.3:
            self.hang(rng.choice(list(world.links)))
        elif roll < 0.12 and (mine := [request for request in self._open() if request.until < 1 << 30]):
            request = rng.choice(mine)
            world.credit(request, len(request.log) + rng.randint(1, 6))
        elif roll < 0.15:
            self.pass_time()
        elif roll < 0.18:
            world.resume()
        elif roll < 0.4 and world.owner.prefills:
            world.advance(rng.choice(list(world.owner.prefills)))
        elif roll < 0.8 and world.links:
            world.deliver(rng.choice(list(world.links)))
        elif world.batch is not None:
            self.flight -= 1
            if self.flight <= 0:
                world.land()
        elif world.launch():
            self.flight = rng.choice([0, 0, 1, 3])

    def _open(self) -> list[Request]:
        return [request for request in self.world.requests.values() if not request.over]

    def hang(self, pull: int) -> None:
        self.world.links[pull].hung = True
        self.hung.setdefault(pull, self.world.now + self.rng.choice([1.0, 15.0]))

    def pass_time(self) -> None:
        world = self.world
        world.now += 0.5
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
            self.one_event()
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
