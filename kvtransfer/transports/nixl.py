"""Blocks out of the owner's memory by NIXL: RDMA or TCP between hosts, shared memory or CMA on one.

Each worker has one agent, made when a pair first needs it, with its whole pool registered: the CPU's memory or a
card's, by the same code. An owner's offer is its agent's metadata and where the pool lies; a puller loads it once per
incarnation and then names blocks by id: a few READs per pull, one descriptor per block, by two threads of the source's
own where a core is idle. A transfer is waited for where it was posted, in short sleeps, until it is terminal. NIXL is
an extra, and only this file imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.messages import KvLayout, Node
from kvtransfer.paths import Cache, Copy, CopyFailed, NoPath
from kvtransfer.transports.hands import Hands, taken

_OFFER = struct.Struct("<8sQQQ32s")  # magic, address of block 0, device, blocks, layout
_MAGIC = b"pagenixl"
_PACKAGES = ("nixl_cu13", "nixl_cu12")  # either will do where no card is used
POLL_S = (0.00005, 0.0005)  # the first wait for a transfer, doubled until the longest
SLICE_BYTES = 64 << 20  # of one trip to the copying thread
READ_BYTES = 4 << 20  # of one READ
AT_ONCE = 1  # READs that a thread posts before it waits for the oldest, besides that one
WORKERS = 2  # of UCX's, one for each of a source's threads: the READs of one worker go one after the other
ANSWER_S = (0.0005, 0.01)  # how often an owner looks whether it is asked for something: while it is pulled from, else
PATIENCE_S = 10.0  # for one transfer, after which its owner is given up
HINT = "pip install 'pagewire[nixl]'"


class Region(NamedTuple):
    """Where a pool's blocks lie, one behind the other."""

    address: int
    num_blocks: int
    kind: str  # NIXL's word: DRAM or VRAM
    device: int = 0


def cpu_region(cache: Cache) -> Region:
    return Region(np.frombuffer(cache.block_bytes(0), np.uint8).ctypes.data, cache.num_blocks, "DRAM")


def card_region(cache: Any) -> Region:
    """Of a cache whose `data` is a tensor on a card."""
    return Region(cache.data.data_ptr(), cache.num_blocks, "VRAM", cache.data.device.index or 0)


class Agent:
    """One NIXL agent with one region. `started_seconds`: what NIXL took, which is not part of any pair's warm-up.

    Raises NoPath if the package is missing or cannot start. Blocking; nothing of it may run on the loop. It has no
    progress thread of NIXL's, which would keep a core busy: whoever waits for something calls `progress`.
    """

    def __init__(self, name: str, layout: KvLayout, region: Region) -> None:
        began = time.monotonic()
        api = _load()
        self.errors = _errors(api)
        shared = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW  # copying threads share the agent, and READ side by side
        try:
            self.nixl = api.nixl_agent(name, api.nixl_agent_config(False, backends=[], sync_mode=shared))
            self.nixl.create_backend("UCX", {"num_workers": str(WORKERS)})
            if "UCX" not in self.nixl.backends:
                raise NoPath("this NIXL has no UCX")
            size = region.num_blocks * layout.block_bytes
            self._registered = self.nixl.register_memory([(region.address, size, region.device, "")], region.kind)
        except self.errors as error:
            raise NoPath(f"NIXL does not start: {_words(error)}") from error
        self.name = name
        self.region = region
        self.binding = threading.Lock()  # while threads are given their workers
        self.block_bytes = layout.block_bytes
        self.here = self.blocks("NIXL_INIT_AGENT", region)
        self.started_seconds = time.monotonic() - began

    def blocks(self, agent: str, region: Region) -> Any:
        """A prepared list with one descriptor per block of `region`, at this agent ("NIXL_INIT_AGENT") or another."""
        whole = [[region.address, self.block_bytes, region.device, self.block_bytes, region.num_blocks]]
        return self.nixl.prep_xfer_dlist(agent, np.array(whole, np.uint64), region.kind)

    def progress(self) -> None:
        self.nixl.get_new_notifs()

    def close(self) -> None:
        self.nixl.release_dlist_handle(self.here)
        self.nixl.deregister_memory(self._registered)


class AgentOnDemand:
    """This process's agent, started by whoever needs it first."""

    def __init__(self, node: Node, layout: KvLayout, region: Region) -> None:
        self._arguments = (agent_name(node), layout, region)
        self._starting: asyncio.Future[Agent] | None = None
        self.agent: Agent | None = None

    async def get(self) -> Agent:
        """Raises NoPath."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(asyncio.to_thread(Agent, *self._arguments))
        self.agent = await asyncio.shield(self._starting)
        return self.agent

    async def prepare(self) -> float:
        """The seconds that it takes from here on. Raises NoPath."""
        began = time.monotonic()
        await self.get()
        return time.monotonic() - began

    async def close(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(NoPath):
                await asyncio.to_thread((await self._starting).close)


def available() -> None:
    """Raises NoPath where the package is not there. Loads nothing."""
    if not any(importlib.util.find_spec(package) for package in _PACKAGES):
        raise NoPath(f"it is not installed; {HINT}")


def _errors(api: Any) -> tuple[type[Exception], ...]:
    """What ends a transfer: NIXL's exceptions have no base of their own, and ours for the states that it reports."""
    named = [value for name, value in vars(api.nixlBind).items() if name.endswith("Error")]
    return (*named, CopyFailed, RuntimeError, ValueError, TypeError)


def _load() -> Any:
    """The Python API of whichever NIXL package is there, and quiet: users read our lines, not the library's."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # read when the library loads
    os.environ.setdefault("UCX_LOG_LEVEL", "FATAL")
    reason = "it is not installed"
    for package in ("nixl", *_PACKAGES):
        try:
            api = importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("nixl"):
                reason = f"it needs the Python package {error.name}"
        except (ImportError, OSError) as error:
            reason = f"it cannot be loaded: {_words(error)}"
        else:
            logging.getLogger("nixl").setLevel(logging.CRITICAL)
            return api
    raise NoPath(f"{reason}; {HINT}")


# ---- the owner of blocks ------------------------------------------------------------------------------------------


class NixlExport:
    """Answers on a thread of its own, which sleeps between looks: longer while nobody pulls."""

    kind = "nixl"

    def __init__(self, agent: AgentOnDemand, layout_digest: bytes) -> None:
        self._agent = agent
        self._layout = layout_digest
        self._pulls = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        pass  # the first puller that asks starts the agent, unless `prepare` has

    async def prepare(self) -> float:
        return await self._agent.prepare()

    async def offer(self) -> bytes:
        agent = await self._agent.get()
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, args=(agent,), name="nixl", daemon=True)
            self._thread.start()
        region = agent.region
        head = _OFFER.pack(_MAGIC, region.address, region.device, region.num_blocks, self._layout)
        metadata: bytes = await asyncio.to_thread(agent.nixl.get_agent_metadata)
        return head + region.kind.encode() + metadata

    def opened(self) -> None:
        self._pulls += 1

    def closed(self) -> None:
        self._pulls -= 1

    def _answer(self, agent: Agent) -> None:
        while not self._ended.wait(ANSWER_S[0] if self._pulls else ANSWER_S[1]):
            agent.progress()

    async def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self._agent.close()


# ---- the puller ---------------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """One READ that is posted, and what NIXL said to that."""

    copies: Sequence[Copy]
    transfer: Any
    state: str


class NixlSource:
    """One owner's blocks. Its threads wait for each READ; any state but "still running" ends it."""

    slice_bytes = SLICE_BYTES

    def __init__(self, agent: Agent, owner: str, region: Region) -> None:
        self._agent = agent
        self._remote = agent.blocks(owner, region)
        self._owner = owner
        self._ending = threading.Event()
        self._hands = Hands()
        self._bound = False  # its threads to their workers
        self.num_blocks = region.num_blocks
        self.operations = 0
        self.gone = False

    def copy(self, cache: Cache, copies: Sequence[Copy]) -> list[int]:
        """Both hands take READs until none is left, and each digests what its own have brought."""
        most = max(1, READ_BYTES // self._agent.block_bytes)
        todo = deque(copies[first : first + most] for first in range(0, len(copies), most))
        digests: dict[int, int] = {}
        try:
            if not self._bound:
                self._bind()
            self._hands.both(lambda: self._some(cache, todo, digests), len(todo))
        except self._agent.errors as error:
            raise CopyFailed(f"NIXL: {_words(error)}") from error
        return [digests[each.position] for each in copies]

    def _bind(self) -> None:
        """NIXL gives a thread the next worker in turn when it first makes a READ, for good: in a row both get one."""
        nixl, first = self._agent.nixl, np.zeros(1, np.int32)

        def make() -> None:
            nixl.release_xfer_handle(nixl.make_prepped_xfer("READ", self._agent.here, first, self._remote, first))

        with self._agent.binding:
            self._hands.meet(make)
        self._bound = True

    def _some(self, cache: Cache, todo: deque[Sequence[Copy]], digests: dict[int, int]) -> None:
        """On one of the two. While a READ is under way the one before is digested; most of those between processes of
        one host are over when they are posted."""
        reading: deque[_Read] = deque()
        try:
            for copies in taken(todo):
                reading.append(self._read(copies))
                while reading and (len(reading) > AT_ONCE or reading[0].state == "DONE"):
                    self._landed(cache, reading.popleft(), digests)
            while reading:
                self._landed(cache, reading.popleft(), digests)
        except BaseException as error:
            if isinstance(error, self._agent.errors):
                self.gone = True
            todo.clear()
            self._give_up(reading)
            raise

    def _read(self, copies: Sequence[Copy]) -> _Read:
        nixl = self._agent.nixl
        here = np.array([each.destination for each in copies], np.int32)
        there = np.array([each.source for each in copies], np.int32)
        self.operations += 1
        transfer = nixl.make_prepped_xfer("READ", self._agent.here, here, self._remote, there)
        return _Read(copies, transfer, nixl.transfer(transfer))

    def _landed(self, cache: Cache, read: _Read, digests: dict[int, int]) -> None:
        self._finish(read)
        for each in read.copies:
            tokens = each.tokens
            digests[each.position] = 0 if tokens is None else cache.digest(each.destination, each.position, tokens)

    def _give_up(self, reading: Iterable[_Read]) -> None:
        """What is still under way is waited for: only then may its blocks be given back."""
        for read in reading:
            with contextlib.suppress(*self._agent.errors):
                self._finish(read)

    def _finish(self, read: _Read) -> None:
        """Waits until no byte can be written any more, however long it takes. A transfer cannot be cancelled: NIXL lets
        go of one that its owner has not answered yet, and the answer is written all the same when it comes."""
        nixl, (_, transfer, state) = self._agent.nixl, read
        pause, patience = POLL_S[0], time.monotonic() + PATIENCE_S
        try:
            while state == "PROC":
                if self._ending.is_set():
                    raise CopyFailed("this process ends")
                time.sleep(pause)
                if time.monotonic() > patience:
                    self.gone = True
                pause = min(2 * pause, ANSWER_S[1] if self.gone else POLL_S[1])
                state = nixl.check_xfer_state(transfer)
        finally:
            if not self._ending.is_set():  # else it ends with the process, and so does the memory
                nixl.release_xfer_handle(transfer)
        if state != "DONE":
            raise CopyFailed("the transfer failed")

    def abort(self) -> None:
        self._ending.set()

    def close(self) -> None:
        self._hands.close()
        with contextlib.suppress(*self._agent.errors):  # the owner may be gone, which is why this is closed
            self._agent.nixl.release_dlist_handle(self._remote)
            self._agent.nixl.remove_remote_agent(self._owner)


class NixlImport:
    kind = "nixl"

    def __init__(self, agent: AgentOnDemand, layout_digest: bytes) -> None:
        self._agent = agent
        self._layout = layout_digest

    async def prepare(self) -> float:
        return await self._agent.prepare()

    async def connect(self, owner: Node, offer: bytes) -> NixlSource:
        return await asyncio.to_thread(self._connect, await self._agent.get(), owner, offer)

    def _connect(self, agent: Agent, owner: Node, offer: bytes) -> NixlSource:
        """Checks what was said before NIXL, which is not made for nonsense, gets the rest."""
        if len(offer) < _OFFER.size + 4:
            raise NoPath("an offer that is none")
        magic, address, device, num_blocks, layout = _OFFER.unpack_from(offer)
        kind = offer[_OFFER.size : _OFFER.size + 4]
        if magic != _MAGIC or kind not in (b"DRAM", b"VRAM"):
            raise NoPath("an offer that is none")
        if layout != self._layout:
            raise NoPath("another layout")
        if not 0 < num_blocks < 2**31 or address + num_blocks * agent.block_bytes >= 2**64 or device >= 2**16:
            raise NoPath(f"a pool of {num_blocks} blocks at {address:#x}")
        nixl = agent.nixl
        try:
            name = nixl.add_remote_agent(offer[_OFFER.size + 4 :])
            name = name.decode() if isinstance(name, bytes) else name
            if name != agent_name(owner):
                nixl.remove_remote_agent(name)
                raise NoPath("another incarnation")
            nixl.make_connection(name)
            return NixlSource(agent, name, Region(address, num_blocks, kind.decode(), device))
        except agent.errors as error:
            raise NoPath(f"NIXL: {_words(error)}") from error

    async def close(self) -> None:
        await self._agent.close()


def agent_name(node: Node) -> str:
    return f"pagewire-{node.incarnation:016x}"


def _words(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
