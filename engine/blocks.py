"""Who holds which KV block: BlockPool hands out block ids, BlockTable is one holder of them.

A block is an int. The pool counts references, gives every return to the free list a new generation (so that
a remote reader can tell a block from its successor), and keeps named full blocks for reuse until their room
is needed. It never touches the bytes, never waits and never talks to anybody: standard library alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

_GENERATIONS = 2**32  # a generation crosses the wire as uint32


class OutOfBlocks(Exception):
    """The pool cannot give `wanted` blocks: only `available` are free or cached without a holder."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} KV blocks are wanted and {available} are available")
        self.wanted = wanted
        self.available = available


def num_blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class BlockPool:
    """A block is free, referenced, or cached: named by its chain digest, without a holder, and evictable.

    Free blocks are reused last in, first out: a stale reader then meets the new tenant soon, in tests too.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # each block's name
        self._named: dict[bytes, int] = {}  # name -> its only block
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._followed = False
        self._sealed: dict[bytes, None] = {}  # changes since drain_changes: each at most num_blocks long
        self._evicted: dict[bytes, None] = {}

    @property
    def available(self) -> int:
        """How many blocks take() can give now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """How many of those hold a named prefix that nobody uses."""
        return len(self._cached)

    def take(self, n: int) -> list[int]:
        """n blocks with one reference each, or OutOfBlocks and nothing taken. Their bytes are a former tenant's."""
        assert n >= 0, f"take({n})"
        if n > self.available:
            raise OutOfBlocks(n, self.available)
        free, refs = self._free, self._refs
        self._evict(n - len(free))
        kept = len(free) - n
        taken = free[kept:]
        del free[kept:]
        taken.reverse()
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each, which is referenced or cached."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                assert block in self._cached, f"block {block} is free and cannot be shared"
                del self._cached[block]
            refs[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """One reference less on each. A sequence's last block is given first, so that its prefix is evicted last."""
        refs, digests = self._refs, self._digests
        for block in reversed(list(blocks)):
            assert refs[block] > 0, f"block {block} is given back without a reference"
            refs[block] -= 1
            if refs[block]:
                continue
            if digests[block] is not None:
                self._cached[block] = None
            else:
                self._release(block)

    def name(self, block: int, digest: bytes) -> bool:
        """Makes a sealed full block findable. False if another block has that name already: the first one keeps it."""
        assert self._refs[block] > 0, f"block {block} is named without a holder"
        if (first := self._named.get(digest)) is not None:
            return first == block
        assert self._digests[block] is None, f"block {block} is sealed under another name"
        self._digests[block] = digest
        self._named[digest] = block
        if self._followed:
            self._note(digest, self._evicted, self._sealed)
        return True

    def name_of(self, block: int) -> bytes | None:
        return self._digests[block]

    def find(self, digest: bytes) -> int | None:
        """The block of that name, if the pool still has it. It may be cached: share() it before counting on it."""
        return self._named.get(digest)

    def find_all(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of these names, up to the first name that the pool does not have."""
        named, found = self._named, list[int]()
        for digest in digests:
            if (block := named.get(digest)) is None:
                break
            found.append(block)
        return found

    def generation(self, block: int) -> int:
        """Goes up each time the block returns to the free list."""
        return self._generations[block]

    def refs(self, block: int) -> int:
        return self._refs[block]

    def follow_changes(self) -> None:
        """From here on, and before anything is named, somebody asks for the changes."""
        assert not self._named, f"{len(self._named)} names are known before somebody follows them"
        self._followed = True

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names that appeared and names that vanished since the last call; what did both is in neither."""
        changes = list(self._sealed), list(self._evicted)
        self._sealed.clear()
        self._evicted.clear()
        return changes

    def ledger(self) -> dict[str, int]:
        cached = len(self._cached)
        free = len(self._free)
        return {"free": free, "cached": cached, "referenced": sum(1 for refs in self._refs if refs)}

    def audit(self, holders: Iterable[Iterable[int]]) -> None:
        """Every reference belongs to exactly one of `holders`, and every block is in exactly one state."""
        held = Counter(block for holder in holders for block in holder)
        for block in held:
            assert 0 <= block < self.num_blocks, f"a holder names block {block} of {self.num_blocks}"
        free = Counter(self._free)
        for block in range(self.num_blocks):
            refs = self._refs[block]
            assert refs == held[block], f"block {block} has {refs} references and {held[block]} holders"
            states = free[block] + (block in self._cached) + (refs > 0)
            assert states == 1, f"block {block} is in {states} states: it must be free, cached or referenced"
        for block in self._cached:
            assert self._digests[block] is not None, f"block {block} is cached without a name"
        for digest, block in self._named.items():
            assert self._digests[block] == digest, f"block {block} and its name disagree"
        assert len(self._named) == self.num_blocks - self._digests.count(None), "a name has no block"

    def _evict(self, count: int) -> None:
        """The `count` least recently used blocks that are cached become free."""
        cached, digests, named = self._cached, self._digests, self._named
        for _ in range(count):
            block, _ = cached.popitem(last=False)
            digest, digests[block] = digests[block], None
            assert digest is not None, f"block {block} is cached without a name"
            del named[digest]
            if self._followed:
                self._note(digest, self._sealed, self._evicted)
            self._release(block)

    def _note(self, digest: bytes, undone: dict[bytes, None], done: dict[bytes, None]) -> None:
        if digest in undone:
            del undone[digest]
        else:
            done[digest] = None

    def _release(self, block: int) -> None:
        self._generations[block] = (self._generations[block] + 1) % _GENERATIONS
        self._free.append(block)


class BlockTable:
    """One sequence's blocks in order. It owns one reference on each until release() or hand_over(), once."""

    def __init__(self, blocks: Iterable[int], block_size: int) -> None:
        self.blocks = list(blocks)
        self.block_size = block_size
        self._over = False

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.blocks) * self.block_size

    def num_blocks_for(self, tokens: int) -> int:
        return num_blocks_for(tokens, self.block_size)

    def append(self, blocks: Iterable[int]) -> None:
        """Takes over the caller's references."""
        assert not self._over, "a block table grows after its end"
        self.blocks.extend(blocks)

    def release(self, pool: BlockPool) -> None:
        pool.give(self.hand_over())

    def hand_over(self) -> list[int]:
        """The references move to the caller; the table is empty and over."""
        assert not self._over, "a block table is released twice"
        self._over = True
        blocks, self.blocks = self.blocks, []
        return blocks
