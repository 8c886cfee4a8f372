"""BlockPool against a dict model, and what its users rely on: references, generations, names, reuse."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.blocks import BlockPool, BlockTable, OutOfBlocks, num_blocks_for


def test_blocks_are_taken_last_in_first_out() -> None:
    pool = BlockPool(4)
    first = pool.take(2)
    pool.give(first[:1])
    assert pool.take(1) == first[:1]


def test_taking_too_many_takes_nothing_and_says_both_numbers() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(OutOfBlocks, match="3 KV blocks are wanted and 2 are available") as error:
        pool.take(3)
    assert (error.value.wanted, error.value.available) == (3, 2)
    assert pool.available == 2


def test_a_block_comes_back_with_a_new_generation() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    before = pool.generation(block)
    pool.give([block])
    assert pool.generation(block) == before + 1


def test_a_cached_block_keeps_its_generation_until_it_is_evicted() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.name(block, b"a")
    before = pool.generation(block)
    pool.give([block])
    pool.share([block])
    assert pool.generation(block) == before
    pool.give([block])
    assert pool.take(1) == [block]
    assert pool.generation(block) == before + 1
    assert pool.find(b"a") is None


def test_a_prefix_outlives_its_tail() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block, digest in zip(blocks, (b"1", b"2", b"3"), strict=True):
        pool.name(block, digest)
    pool.give(blocks)
    pool.take(1)
    assert pool.find(b"1") is not None and pool.find(b"2") is not None and pool.find(b"3") is None


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    assert pool.name(first, b"a") and pool.name(first, b"a")
    assert not pool.name(second, b"a")
    pool.give([second])
    assert pool.ledger() == {"free": 1, "cached": 0, "referenced": 1}


def test_our_own_mistakes_are_caught() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.give([block])
    with pytest.raises(AssertionError, match="given back without a reference"):
        pool.give([block])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([block])
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match=f"block {block} has 1 references and 0 holders"):
        pool.audit([])
    with pytest.raises(AssertionError, match=f"block {block} has 1 references and 2 holders"):
        pool.audit([[block], [block]])
    pool.audit([[block]])


def test_changes_of_names_are_told_once() -> None:
    pool = BlockPool(2)
    pool.follow_changes()
    blocks = pool.take(2)
    pool.name(blocks[0], b"a")
    pool.name(blocks[1], b"b")
    assert pool.drain_changes() == ([b"a", b"b"], [])
    pool.give(blocks)
    taken = pool.take(2)
    pool.name(taken[0], b"a")  # came back before anybody was told that it went
    pool.name(taken[1], b"c")
    assert pool.drain_changes() == ([b"c"], [b"b"])
    assert pool.drain_changes() == ([], [])


def test_a_table_is_released_once() -> None:
    pool = BlockPool(4)
    table = BlockTable(pool.take(2), 16)
    table.append(pool.take(1))
    assert (table.capacity, table.num_blocks_for(33), num_blocks_for(32, 16), num_blocks_for(0, 16)) == (48, 3, 2, 0)
    table.release(pool)
    assert pool.available == 4
    with pytest.raises(AssertionError, match="released twice"):
        table.release(pool)


def test_a_table_that_was_handed_over_gives_nothing_back() -> None:
    pool = BlockPool(2)
    table = BlockTable(pool.take(2), 16)
    moved = table.hand_over()
    with pytest.raises(AssertionError, match="released twice"):
        table.release(pool)
    pool.audit([moved])


NUM_BLOCKS = 6
DIGESTS = [bytes([value]) for value in range(8)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: per block its references and name; the cached ones in order of their last use; who knows what."""

    references = Bundle("references")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.pool.follow_changes()
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.names: dict[int, bytes] = {}
        self.cached: list[int] = []
        self.generations = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.told: set[bytes] = set()

    def free(self) -> int:
        return NUM_BLOCKS - sum(refs > 0 for refs in self.refs.values()) - len(self.cached)

    @rule(target=references, n=st.integers(0, 4))
    def take(self, n: int) -> object:
        room = self.free() + len(self.cached)
        if n > room:
            with pytest.raises(OutOfBlocks):
                self.pool.take(n)
            return multiple()
        for block in self.cached[: max(0, n - self.free())]:
            self.cached.remove(block)
            del self.names[block]
            self.generations[block] += 1
        taken = self.pool.take(n)
        assert len(set(taken)) == n
        for block in taken:
            assert self.refs[block] == 0 and block not in self.cached, "a block with a holder was taken"
            self.refs[block] = 1
        return multiple(*taken)

    @rule(block=consumes(references))
    def give(self, block: int) -> None:
        self.pool.give([block])
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if block in self.names:
                self.cached.append(block)
            else:
                self.generations[block] += 1

    @rule(target=references, block=references)
    def share(self, block: int) -> int:
        self.pool.share([block])
        self.refs[block] += 1
        return block

    @rule(target=references, digest=st.sampled_from(DIGESTS))
    def share_by_name(self, digest: bytes) -> object:
        block = self.pool.find(digest)
        assert block == next((known for known, name in self.names.items() if name == digest), None)
        if block is None:
            return multiple()
        self.pool.share([block])
        self.refs[block] += 1
        if block in self.cached:
            self.cached.remove(block)
        return block

    @rule(block=references, digest=st.sampled_from(DIGESTS))
    def name(self, block: int, digest: bytes) -> None:
        taken = digest in self.names.values()
        if block in self.names and not taken:
            return  # a sealed block never gets a second name: asking is our bug
        assert self.pool.name(block, digest) == (not taken or self.names.get(block) == digest)
        if not taken:
            self.names[block] = digest

    @rule()
    def tell(self) -> None:
        sealed, evicted = self.pool.drain_changes()
        assert set(sealed).isdisjoint(self.told) and set(evicted) <= self.told
        self.told = (self.told | set(sealed)) - set(evicted)
        assert self.told == set(self.names.values())

    @invariant()
    def agrees(self) -> None:
        for block in range(NUM_BLOCKS):
            assert self.pool.refs(block) == self.refs[block]
            assert self.pool.generation(block) == self.generations[block]
        referenced = sum(refs > 0 for refs in self.refs.values())
        assert self.pool.ledger() == {"free": self.free(), "cached": len(self.cached), "referenced": referenced}
        assert self.pool.available == self.free() + len(self.cached)
        self.pool.audit([[block] * refs for block, refs in self.refs.items()])


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
