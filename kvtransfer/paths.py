"""What a transport is, which goes before which, and what a puller knows of a path that it has proved.

How one plugs in. A one-sided transport is a module kvtransfer/transports/KIND.py with two classes. The owner's is an
Export: its `offer` is sent once to each puller that tries this path, in the answer to its Pair call. The puller's is an
Import: `connect` turns that offer into a Source, which can copy blocks by id. KIND stands in BEST_FIRST and ONE_SIDED
below, and offer.py makes both where the engine's memory suits. All else is here already: pairing, the probe that proves
and measures a path, falling back, digests compared, the owner asked after each copy, blocks that drain until `copy` has
returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import KvLayout, Node

BEST_FIRST = ("local", "cuda_ipc", "memfd", "nixl", "grpc")
ONE_SIDED = frozenset({"cuda_ipc", "memfd", "nixl"})  # the puller copies, and asks the owner afterwards
BETWEEN_PROCESSES = BEST_FIRST[1:]
GB = 1e9  # bytes, in which rates are said


class NoPath(Exception):
    """A path to an owner cannot be used. str() is the reason, a few words for a log line."""


class CopyFailed(Exception):
    """A copy that was begun is over without its bytes. str() is the reason, a few words."""


class Cache(Protocol):
    """What a transport needs of a KVCache. Blocks in the CPU's memory have `block_bytes` too."""

    num_blocks: int  # with those that are kept for probes

    @property
    def layout(self) -> KvLayout: ...
    def block_bytes(self, block: int, count: int = 1) -> memoryview: ...
    def write(self, block: int, offset: int, data: bytes | memoryview) -> None: ...
    def digest(self, block: int, position: int, tokens: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class Copy:
    """One block: where its bytes are, where they go, and the tokens that its digest covers (None: no digest)."""

    source: int
    position: int
    destination: int
    tokens: Sequence[int] | None


class Export(Protocol):
    """The owner's half of one transport, for as long as the process lives."""

    kind: str

    def start(self) -> None:
        """Once, on the loop, before anybody pairs."""

    async def prepare(self) -> float:
        """What starts once per process. Returns the seconds it took. Raises NoPath."""

    async def offer(self) -> bytes:
        """What a puller needs to connect, besides the incarnation; may be empty. Asked for by pullers that want this
        path. Raises NoPath."""

    def opened(self) -> None:
        """A pull by this path begins."""

    def closed(self) -> None:
        """A pull by this path is over, and no copy of it is under way."""

    async def close(self) -> None: ...


class Source(Protocol):
    """One owner's blocks, within reach of this process."""

    num_blocks: int
    slice_bytes: int  # of one `copy`: what a pull that is over waits for
    operations: int  # copies that were posted: at most one per block, and two per pull

    @property
    def gone(self) -> bool:
        """The owner has ended: nothing that is still readable may be believed."""

    def copy(self, cache: Cache, copies: Sequence[Copy]) -> list[int]:
        """Blocks the calling thread, which is this source's own, until no byte can be written any more.

        The digests are those of the bytes in place, in the order of `copies`. Raises CopyFailed. Returning late is
        allowed, returning while a copy may still write is not: the blocks of a pull that is over wait for it.
        """

    def abort(self) -> None:
        """The process ends: `copy` raises soon, whatever its bytes may do."""

    def close(self) -> None:
        """No copy is under way, and none will be. On the source's thread."""


class Import(Protocol):
    """The puller's half of one transport."""

    kind: str

    async def prepare(self) -> float:
        """What starts once per process, whoever the owner is. Returns the seconds it took. Raises NoPath."""

    async def connect(self, owner: Node, offer: bytes) -> Source:
        """Once per incarnation. Raises NoPath."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class Route:
    """How blocks come from one owner: proved, measured, and counted since."""

    transport: str
    source: Source | None  # None: over the stream
    bytes_per_second: float = 0.0
    fallback: str = ""  # why not by a better way
    warm_seconds: float = 0.0
    start_seconds: float = 0.0
    thread: ThreadPoolExecutor | None = None  # the source's own: one owner that hangs holds up nobody else
    met_at: float = 0.0
    answered_at: float = 0.0  # when its owner's process was last known to have its address
    ended: bool = False  # no copy may begin
    suspect: bool = False  # a copy failed: it is proved again before the next pull
    bytes: int = 0
    transfers: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def usable(self) -> bool:
        return self.transport != ""

    def __str__(self) -> str:
        return f"{self.transport} ({self.fallback})" if self.fallback else self.transport
