"""The values that router and workers say to each other, as plain data: the sans-IO cores speak only these.

Standard library alone. `wire.codec` turns them into protobuf and back; nothing else does. Durations are
seconds from the moment of receipt, never absolute times, so that clocks need not agree between hosts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from engine.types import FinishReason, SamplingParams, Token, TokenLogprob


class RequestKey(NamedTuple):
    """Minted by the router, never by a client. `attempt` counts prefills, `placement` DecodeStarts of an attempt."""

    request: int
    attempt: int
    placement: int = 0


class Reason(enum.Enum):
    """Why something was refused or failed. Values equal the wire enum's numbers."""

    OUT_OF_BLOCKS = 1  # decode: preempted; refused: the pool can never hold it
    QUEUE_FULL = 2
    DRAINING = 3
    LAYOUT_MISMATCH = 4
    STALE_TICKET = 5  # unknown, expired, of another incarnation, or already taken
    SUPERSEDED = 6  # a higher placement owns the ticket
    COPY_FAILED = 7
    DEADLINE = 8
    INVALID_FIELD = 9
    UNIMPLEMENTED = 10
    INTERNAL = 11


class Node(NamedTuple):
    """`incarnation` is random at every process start; nothing is trusted across a change of it."""

    name: str
    incarnation: int
    address: str  # host:port where KvTransferService answers


class KvLayout(NamedTuple):
    """Two workers may exchange KV only if every field agrees."""

    model_digest: bytes
    dtype: str
    block_size: int  # tokens per block
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    numerics: str  # torch, kernel and determinism versions


class TransportOffer(NamedTuple):
    kind: str  # "local", "grpc", ...
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerHello:
    node: Node
    layout: KvLayout
    total_blocks: int
    max_num_seqs: int
    max_model_len: int
    transports: Sequence[TransportOffer] = ()


class KvPath(NamedTuple):
    """How blocks come from one owner, as its puller proved and measured it."""

    owner: str  # its address
    transport: str  # empty: none may be used, and `fallback` says why
    bytes_per_second: float
    warm_seconds: float  # connecting, exchanging descriptors and proving the path
    fallback: str = ""  # why not by a better way
    bytes: int = 0
    transfers: int = 0  # pulls that were delivered
    failures: Mapping[str, int] = MappingProxyType({})  # pulls that were not, by reason
    start_seconds: float = 0.0  # that the transport's own library took at both ends, apart from the warm-up

    def __str__(self) -> str:
        """In words, as start-up lines and `pagewire ps` have it."""
        if not self.transport:
            return f"KV from {self.owner} cannot be pulled: {self.fallback}"
        rate = f"{self.bytes_per_second / 1e9:.2f} GB/s" if self.bytes_per_second else "not measured"
        words = f"KV from {self.owner} by {self.transport}, {rate}, warm in {self.warm_seconds * 1e3:.0f} ms"
        if self.start_seconds >= 0.01:
            words += f" and {self.start_seconds:.1f} s for {self.transport} itself to start"
        return f"{words} ({self.fallback})" if self.fallback else words


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0  # free plus unreferenced cached
    leased_blocks: int = 0
    step_seconds: float = 0.0  # moving average
    draining: bool = False
    pulled_blocks: int = 0  # copied in from other workers since this one started
    kv_path: str = ""  # how they came, and why not by a better way; empty until the first
    kv_paths: Sequence[KvPath] = ()
    refuses: str = ""  # why this worker takes no work, though it is up
    cached_blocks: int = 0  # of the free ones: named, and kept until the room is needed


@dataclass(frozen=True, slots=True)
class RouterHello:
    router: str
    incarnation: int
    session: int  # a newer session of the same router incarnation ends its older ones first


@dataclass(frozen=True, slots=True)
class Ticket:
    """A claim on a prompt's blocks, opaque to the router. `block_hashes` name the prompt's full blocks in order."""

    id: int
    owner: Node
    num_tokens: int
    num_blocks: int
    time_to_live: float
    block_hashes: Sequence[bytes] = ()
    consumers: int = 1


class StageTimes(NamedTuple):
    """Seconds: waiting for the stage, computing in it, and moving KV into it."""

    queued: float = 0.0
    computed: float = 0.0
    transferred: float = 0.0


NO_TIMES = StageTimes()


# ---- router -> worker -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillStart:
    """`token_ids` is the prompt, then the `emitted` tokens that the client already has.

    `request_id` is the client's name for it and `traceparent` the W3C trace context of its span: for logs and traces
    alone, never a key.
    """

    key: RequestKey
    token_ids: Sequence[int]
    emitted: int
    params: SamplingParams  # seed and max_tokens are always set
    deadline: float  # seconds left
    age: float  # seconds since the client's call, kept over attempts: the order of service
    cache_namespace: bytes = b""
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class DecodeStart:
    key: RequestKey
    ticket: Ticket
    token_ids: Sequence[int]
    emitted: int
    params: SamplingParams
    deadline: float
    age: float
    until_index: int  # first credit: may send indices below this
    cache_namespace: bytes = b""
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Credit:
    key: RequestKey
    until_index: int  # absolute: may send indices below this


@dataclass(frozen=True, slots=True)
class Heartbeat:
    sequence: int


@dataclass(frozen=True, slots=True)
class Drain:
    grace: float


@dataclass(frozen=True, slots=True)
class Peers:
    """Every prefill worker that a router has: a decode worker pairs with each before a request needs it."""

    owners: Sequence[Node]


# ---- worker -> router -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    key: RequestKey
    ticket: Ticket
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token `emitted` of the request, sampled by the prefill from the last position.

    Sent to the router and over Pull; the decode worker repeats it ahead of its own first token, which is
    also the sign that the slot runs there. `finish_reason` is set when this token ends the request;
    `stop_token_id` is then the stop token that matched, if one did.
    """

    key: RequestKey
    token: Token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    times: StageTimes = NO_TIMES


class Row(NamedTuple):
    """One token of one request in a StepBatch."""

    key: RequestKey
    token: Token


class Finish(NamedTuple):
    key: RequestKey
    reason: FinishReason
    stop_token_id: int | None
    times: StageTimes


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that one engine step produced for one router session. A Finish rides with its last token."""

    step: int
    rows: Sequence[Row]
    finishes: Sequence[Finish] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing is held. From a decode worker: the ticket is still good for another one."""

    key: RequestKey
    reason: Reason
    retry_after: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The job is over here. Preemption and drain use it too, with `resumable` set."""

    key: RequestKey
    reason: Reason
    resumable: bool
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Block hashes that became or ceased to be reusable; a gap in `sequence` means: ask for everything again."""

    sealed: Sequence[bytes]
    evicted: Sequence[bytes]
    sequence: int


# ---- puller -> owner ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairRequest:
    owner_incarnation: int
    puller: Node
    layout: KvLayout
    transports: Sequence[TransportOffer] = ()


@dataclass(frozen=True, slots=True)
class PairReply:
    owner: Node
    layout: KvLayout
    transports: Sequence[TransportOffer] = ()
    probe_blocks: int = 0  # that ticket 0 stands for
    start_seconds: float = 0.0  # that a library of the owner's took to start, because of this call


@dataclass(frozen=True, slots=True)
class PullOpen:
    ticket: int
    key: RequestKey
    owner_incarnation: int
    transport: str
    layout_digest: bytes
    window_bytes: int = 0  # how far the owner may run ahead of PullWant's consumption; 0 means its own default
    request_id: str = ""  # the client's name for it, for the logs


@dataclass(frozen=True, slots=True)
class PullWant:
    """Destinations are bound for these positions: bytes flow only for them."""

    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class PullCopied:
    """One-sided transports: these were copied, are they still what was announced?"""

    blocks: Sequence[BlockHandle]


@dataclass(frozen=True, slots=True)
class PullDone:
    """Everything landed and was validated: the owner may free."""


# ---- owner -> puller ------------------------------------------------------------------------------------------


class BlockHandle(NamedTuple):
    """A block as its owner announces it. `position` is the logical index in the sequence."""

    id: int
    generation: int
    position: int
    digest: int


@dataclass(frozen=True, slots=True)
class PullOpened:
    layout_digest: bytes


@dataclass(frozen=True, slots=True)
class BlocksSealed:
    blocks: Sequence[BlockHandle]


@dataclass(frozen=True, slots=True)
class BlocksValid:
    positions: Sequence[int]
    stale_positions: Sequence[int] = ()


PrefillCommand = PrefillStart | Cancel | Drain | Heartbeat
DecodeCommand = DecodeStart | Cancel | Credit | Drain | Peers | Heartbeat
PrefillEvent = PrefillAccepted | FirstToken | Refused | Failed | WorkerLoad | CacheChange
DecodeEvent = FirstToken | StepBatch | Refused | Failed | WorkerLoad
PullRequest = PullOpen | PullWant | PullCopied | PullDone | Heartbeat
PullEvent = PullOpened | BlocksSealed | BlocksValid | FirstToken | Failed | Heartbeat
