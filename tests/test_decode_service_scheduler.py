"""Who gets blocks and who gives way, with plain ints: the admission rule, growth, stalls, preemption, order."""

from __future__ import annotations

from decode_service.scheduler import UNBOUND, DecodeScheduler, Slot
from engine.blocks import BlockPool
from engine.prefix_cache import chain, root_digest

SIZE = 4
ROOT = root_digest(b"", b"m", "", "f", SIZE)


class Bench:
    """A scheduler whose slots arrive when told."""

    def __init__(self, blocks: int, max_num_seqs: int = 8, headroom: int = 0) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = DecodeScheduler(self.pool, SIZE, max_num_seqs, headroom=headroom)
        self.last = 0

    def add(self, tokens: int, age_start: float = 0.0, hashes: list[bytes] | None = None, lent: bool = False) -> Slot:
        self.last += 1
        slot = Slot(self.last, tokens, age_start, hashes or [], lent=lent)
        self.scheduler.add(slot)
        return slot

    def land(self, slot: Slot) -> None:
        """Every block arrives, and the slot runs."""
        self.scheduler.bind(slot, [position for position, block in enumerate(slot.blocks) if block == UNBOUND])
        self.scheduler.run(slot)

    def running(self, tokens: int, age_start: float = 0.0) -> Slot:
        slot = self.add(tokens, age_start)
        assert self.scheduler.admit() is slot
        self.land(slot)
        return slot

    def leave(self, slot: Slot) -> None:
        self.scheduler.remove(slot)
        self.pool.give(slot.hand_over())


def test_a_slot_arrives_only_when_prompt_and_next_token_can_be_promised() -> None:
    bench = Bench(6)
    first, second = bench.add(8), bench.add(12)  # 2 blocks alone, then 3 + 1 beside it
    assert bench.scheduler.admit() is first and first.promised == 2
    assert bench.scheduler.promised == 2 and bench.pool.available == 6
    assert bench.scheduler.admit() is second and second.promised == 4
    third = bench.add(1)
    assert bench.scheduler.admit() is None
    bench.land(first)
    assert bench.scheduler.admit() is None and bench.scheduler.unpromised == 0
    bench.leave(first)
    assert bench.scheduler.admit() is third


def test_the_next_tokens_block_is_not_demanded_of_a_slot_that_is_alone() -> None:
    bench = Bench(2)
    slot = bench.add(8)
    assert bench.scheduler.admit() is slot
    bench.land(slot)
    assert not bench.scheduler.fits(slot)
    crowded = Bench(2)
    assert crowded.running(4)
    crowded.add(4)
    assert crowded.scheduler.admit() is None, "beside another it needs two blocks, and one is left"


def test_a_promise_is_not_taken_by_growth() -> None:
    bench = Bench(4)
    runs, arrives = bench.running(3), bench.add(11)
    assert bench.scheduler.admit() is arrives and bench.scheduler.unpromised == 0
    runs.length = 5
    assert bench.scheduler.grow(0) == [] and runs.stalled, "it waits: another is arriving and nobody can give way"
    assert len(bench.scheduler.bind(arrives, range(3))) == 3


def test_held_blocks_are_referenced_before_they_are_counted() -> None:
    tokens = list(range(12))
    bench = Bench(4)
    slot = bench.running(12)
    for block, name in zip(slot.blocks, chain(ROOT, tokens, SIZE), strict=False):
        bench.pool.name(block, name)
    bench.leave(slot)
    bench.running(2)
    assert bench.pool.available == 3
    again = bench.add(12, hashes=chain(ROOT, tokens, SIZE))
    # 4 blocks are wanted and 2 are held, but holding them leaves one that is free.
    assert bench.scheduler.admit() is None
    assert again.blocks == [] and bench.pool.available == 3


def test_held_blocks_are_counted_and_never_include_the_last_position() -> None:
    tokens = list(range(12))
    bench = Bench(8)
    slot = bench.running(12)
    for block, name in zip(slot.blocks, chain(ROOT, tokens, SIZE), strict=False):
        bench.pool.name(block, name)
    again = bench.add(12, hashes=chain(ROOT, tokens, SIZE))
    assert bench.scheduler.admit() is again
    assert again.held == 2 and again.promised == 2 and again.blocks == [*slot.blocks[:2], UNBOUND]


def test_the_oldest_waits_first_and_nobody_passes_it() -> None:
    bench = Bench(6)
    runs = bench.running(4, age_start=0.0)
    young, old = bench.add(4, age_start=9.0), bench.add(20, age_start=1.0)
    assert bench.scheduler.admit() is None, "the young one would fit"
    bench.leave(runs)
    assert bench.scheduler.admit() is old
    assert bench.scheduler.admit() is None and young in bench.scheduler.waiting


def test_a_waiting_slot_without_credit_counts_as_newest() -> None:
    bench = Bench(6)
    old, young = bench.add(4, age_start=1.0), bench.add(4, age_start=9.0)
    old.credit = False
    assert bench.scheduler.admit() is young


def test_the_newest_running_slot_gives_way_to_growth() -> None:
    bench = Bench(4)
    old, young = bench.running(7, age_start=1.0), bench.running(7, age_start=2.0)
    old.length = young.length = 9
    assert bench.scheduler.grow(0) == [young]
    assert bench.scheduler.fits(old) and len(old.blocks) == 3 and not old.stalled
    assert young.blocks == [] and bench.scheduler.running == [old] and bench.pool.available == 1


def test_the_newest_may_be_the_one_that_grows() -> None:
    bench = Bench(4)
    old, young = bench.running(7, age_start=1.0), bench.running(7, age_start=2.0)
    young.length = 9
    assert bench.scheduler.grow(0) == [young]
    assert bench.scheduler.running == [old] and bench.pool.available == 2


def test_the_only_running_slot_gives_way_when_nobody_is_arriving() -> None:
    bench = Bench(2)
    slot = bench.running(8)
    assert bench.scheduler.grow(0) == [slot] and bench.pool.available == 2


def test_a_slot_without_credit_gives_way_before_a_newer_one_with_credit() -> None:
    bench = Bench(6)
    old, middle, young = (bench.running(7, age_start=float(age)) for age in range(3))
    old.credit = False
    middle.length = 9
    assert bench.scheduler.grow(0) == [old]
    assert bench.scheduler.running == [middle, young]


def test_a_slot_without_credit_asks_for_nothing() -> None:
    bench = Bench(2)
    slot = bench.running(8)
    slot.credit = False
    assert bench.scheduler.grow(0) == [] and not slot.stalled


def test_draining_blocks_count_as_coming() -> None:
    bench = Bench(6)
    slots = [bench.running(7, age_start=float(age)) for age in range(3)]
    for slot in slots:
        slot.length = 9
    # Three blocks are short and two will come: one slot gives way, and its blocks serve before the drained ones.
    assert bench.scheduler.grow(2) == [slots[2]]
    assert [slot.stalled for slot in slots[:2]] == [True, True]
    assert bench.scheduler.grow(2) == [] and all(bench.scheduler.fits(slot) for slot in slots[:2])
    assert not bench.scheduler.stalled


def test_nothing_is_admitted_while_a_slot_is_stalled() -> None:
    bench = Bench(4)
    bench.running(4)
    taken = bench.pool.take(3)  # blocks that drain
    assert bench.scheduler.grow(3) == [] and bench.scheduler.stalled
    bench.pool.give(taken)
    waits = bench.add(1)
    assert bench.scheduler.admit() is None
    assert bench.scheduler.grow(0) == [] and not bench.scheduler.stalled
    assert bench.scheduler.admit() is waits


def test_headroom_is_kept_free_for_each_running_slot() -> None:
    bench = Bench(6, headroom=2)
    slot = bench.running(4)
    bench.add(12)
    assert bench.scheduler.admit() is None, "4 blocks are wanted, and of 5 free ones 2 are kept"
    bench.leave(slot)
    assert bench.scheduler.admit() is not None, "with nothing running there is nothing to keep free"


def test_seats_are_small_and_come_back() -> None:
    bench = Bench(16, max_num_seqs=2)
    first, second = bench.running(1), bench.running(1)
    third = bench.add(1)
    assert {first.seat, second.seat} == {0, 1} and bench.scheduler.admit() is None
    bench.leave(first)
    assert bench.scheduler.admit() is third and third.seat == 0


def test_a_slot_that_leaves_while_arriving_frees_its_promise() -> None:
    bench = Bench(4)
    slot = bench.add(12)
    assert bench.scheduler.admit() is slot
    bench.scheduler.bind(slot, [0])
    assert bench.scheduler.promised == 2
    bench.leave(slot)
    assert bench.scheduler.promised == 0 and bench.pool.available == 4


def test_lent_blocks_need_no_room_but_for_the_next_token() -> None:
    bench = Bench(4)
    table = bench.pool.take(4)
    slot = bench.add(16, lent=True)
    assert bench.scheduler.admit() is slot and slot.promised == 0, "alone, it needs nothing"
    slot.blocks = table
    bench.scheduler.run(slot)
    assert bench.scheduler.grow(0) == [slot] and bench.pool.available == 4
