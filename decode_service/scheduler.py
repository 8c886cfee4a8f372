"""Which requests own the decode worker's blocks, and who gives way. Plain Python over ints and lists.

A slot is waiting, arriving (its blocks are being copied in), running, or running and stalled. The rule is late
binding under promises: a slot arrives only when everything it needs is promised to it, so an arriving slot never
waits for a block and is never a victim; a running slot grows by one block at a time, and when none is left the
newest running slot gives way. A running slot whose client has not read for a while keeps nobody else waiting: it
gives way to an arrival. Age decides, and age is kept over attempts, so nothing starves.

Knows nothing of sessions, messages, transports or time. It takes blocks; giving them back is left to the decoder,
which alone knows when nothing writes into them any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.blocks import BlockPool, num_blocks_for
from engine.prefix_cache import reusable

UNBOUND = -1


@dataclass(slots=True, eq=False)
class Slot:
    """One request's claim on blocks. `age_start` is when the client's call began: the smaller, the older.

    `lent`: the prompt's blocks belong to a ticket on the same pool and change owner when it is computed, in any
    state; nothing but growth is taken. `blocks` are in the order of positions and the slot owns one reference on
    each; UNBOUND marks a position without a block. The first `held` of them were in the pool before: nothing is
    copied into them. `promised` counts blocks that are promised and not taken yet. `length` is how many positions
    the next step needs.
    """

    id: int
    num_tokens: int
    age_start: float
    hashes: Sequence[bytes] = ()  # chain digests of the prompt's full blocks
    lent: bool = False
    credit: bool = True
    parked: bool = False  # runs and has had no credit for a while
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    held: int = 0
    promised: int = 0
    fresh: list[int] = field(default_factory=list)  # taken by growth and not zeroed yet
    seat: int = -1  # small and stable while arriving or running
    stalled: bool = False

    @property
    def order(self) -> tuple[bool, float, int]:
        """The oldest first; without credit a slot counts as newest, because it can wait and others cannot."""
        return (not self.credit, self.age_start, self.id)

    def hand_over(self) -> list[int]:
        """The references move to the caller. The list itself is left alone: a step in flight may still read it."""
        owned = [block for block in self.blocks if block != UNBOUND]
        self.blocks, self.held, self.fresh = [], 0, []
        return owned


class DecodeScheduler:
    """`headroom` blocks are kept free per running slot at admission: fewer preemptions for a little less room."""

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, max_waiting: int = 256, headroom: int = 2
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_waiting = max_waiting
        self.headroom = headroom
        self.waiting: list[Slot] = []
        self.arriving: list[Slot] = []
        self.running: list[Slot] = []
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))

    def blocks_for(self, tokens: int) -> int:
        return num_blocks_for(tokens, self.block_size)

    @property
    def promised(self) -> int:
        """Blocks that are free or cached now and already spoken for."""
        return sum(slot.promised for slot in self.arriving)

    @property
    def unpromised(self) -> int:
        return self.pool.available - self.promised

    @property
    def stalled(self) -> bool:
        """While it is true nothing is admitted, here or by a prefill on the same pool."""
        return any(slot.stalled for slot in self.running)

    # ---- waiting -> arriving --------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return len(self.waiting) >= self.max_waiting

    def add(self, slot: Slot) -> None:
        self.waiting.append(slot)

    def admit(self) -> Slot | None:
        """The oldest waiting slot becomes arriving if all it needs can be promised; no younger one passes it."""
        if not self.waiting or not self._free_seats or self.stalled:
            return None
        slot = min(self.waiting, key=lambda each: each.order)
        wanted = self._wanted(slot, len(self.running))
        spare = self.unpromised - self.headroom * len(self.running)
        held = self._reusable(slot)
        wanted -= len(held)
        if wanted > spare:
            return None
        self.pool.share(held)  # before they are counted: an unreferenced cached block was counted as spare
        if wanted > self.unpromised - self.headroom * len(self.running):
            self.pool.give(held)
            return None
        self.waiting.remove(slot)
        if not slot.lent:
            slot.held = len(held)
            slot.blocks = held + [UNBOUND] * (self.blocks_for(slot.num_tokens) - len(held))
        slot.promised = wanted
        slot.seat = self._free_seats.pop()
        self.arriving.append(slot)
        return slot

    def in_the_way(self) -> list[Slot]:
        """Parked slots, the newest first, that must leave for the oldest waiting slot to arrive: as few as it takes.

        Empty if it has no credit itself, or if they would not be enough. A parked slot is in no step.
        """
        parked = sorted((slot for slot in self.running if slot.parked), key=lambda each: each.order, reverse=True)
        if not parked or not self.waiting or self.stalled:
            return []
        slot = min(self.waiting, key=lambda each: each.order)
        if not slot.credit:
            return []
        # A held block that nobody references counts as spare and is used up by holding it.
        held = {block for block in self._reusable(slot) if self.pool.refs(block)}
        freed: set[int] = set()
        for count, victim in enumerate(parked, 1):
            freed.update(block for block in victim.blocks if block != UNBOUND and self.pool.refs(block) == 1)
            left = len(self.running) - count
            wanted = self._wanted(slot, left) - len(held - freed)
            if wanted <= self.unpromised + len(freed) - self.headroom * left:
                return parked[:count]
        return []

    def _wanted(self, slot: Slot, running: int) -> int:
        """Blocks to promise, before those that are held: the prompt's, and the next token's unless it is alone."""
        alone = not self.arriving and not running
        whole = self.blocks_for(slot.num_tokens + (0 if alone else 1))
        return whole - self.blocks_for(slot.num_tokens) if slot.lent else whole

    def _reusable(self, slot: Slot) -> list[int]:
        return [] if slot.lent else reusable(self.pool, slot.hashes, slot.num_tokens, self.block_size)

    # ---- arriving -> running --------------------------------------------------------------------------------------

    def bind(self, slot: Slot, positions: Sequence[int]) -> list[int]:
        """A promise becomes the destination of each of these positions."""
        count = len(positions)
        assert slot.promised >= count, f"slot {slot.id} has {slot.promised} promises for {count} positions"
        taken = self.pool.take(count)
        slot.promised -= count
        for position, block in zip(positions, taken, strict=True):
            assert slot.blocks[position] == UNBOUND, f"slot {slot.id}: position {position} is bound twice"
            slot.blocks[position] = block
        return taken

    def run(self, slot: Slot) -> None:
        """Every block of the prompt is in place: a promise that is left becomes the block of the next token."""
        have = self.blocks_for(slot.num_tokens)
        assert len(slot.blocks) == have and UNBOUND not in slot.blocks, f"slot {slot.id} runs on {slot.blocks}"
        if slot.promised:
            slot.blocks.append(UNBOUND)
            slot.fresh += self.bind(slot, [have])
        self.arriving.remove(slot)
        self.running.append(slot)
        slot.length = slot.num_tokens + 1

    # ---- growth ---------------------------------------------------------------------------------------------------

    def fits(self, slot: Slot) -> bool:
        """Whether the next step's positions all have a block."""
        return slot.length <= len(slot.blocks) * self.block_size

    def reach(self, slot: Slot, positions: int) -> None:
        """Blocks for these positions ahead of need, as far as there are any that nobody was promised."""
        while len(slot.blocks) * self.block_size < positions and self.unpromised > 0:
            (block,) = self.pool.take(1)
            slot.blocks.append(block)
            slot.fresh.append(block)

    def grow(self, coming: int) -> list[Slot]:
        """Gives each slot that runs next its block, oldest first; returns the slots that gave way, already removed.

        `coming` blocks are draining: whoever is short waits for those first. Only with no step in flight, because
        the blocks of those who give way go back at once.
        """
        victims: list[Slot] = []
        for slot in self.running:
            slot.stalled = False
        for slot in sorted((s for s in self.running if s.credit and not self.fits(s)), key=lambda each: each.order):
            while slot not in victims:
                if self.unpromised > 0:
                    (block,) = self.pool.take(1)
                    slot.blocks.append(block)
                    slot.fresh.append(block)
                    break
                if coming > 0:
                    coming -= 1
                    slot.stalled = True
                    break
                if len(self.running) == 1 and self.arriving:  # it would give way to nobody's gain
                    slot.stalled = True
                    break
                victim = max(self.running, key=lambda each: each.order)
                victims.append(victim)
                self.remove(victim)
                self.pool.give(victim.hand_over())
        return victims

    def remove(self, slot: Slot) -> None:
        """The slot leaves. Its promise is void; its blocks stay in `slot.blocks` for the caller to give back."""
        for slots in (self.waiting, self.arriving, self.running):
            if slot in slots:
                slots.remove(slot)
        if slot.seat >= 0:
            self._free_seats.append(slot.seat)
            slot.seat = -1
        slot.promised = 0
        slot.stalled = False
