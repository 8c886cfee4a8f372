"""What the workers' sans-IO cores ask their driver to do, as plain values.

A core never performs an action: it returns a list, and the driver (a servicer, or the simulator) carries
the list out in order. Notices (Announced, Landed, Ready, Adopted, PullFailed, Drained) go from the inbox to the
decoder inside one process and never reach a driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.messages import (
    BlockHandle,
    DecodeEvent,
    FirstToken,
    Node,
    PrefillEvent,
    PullEvent,
    PullOpen,
    PullRequest,
    Reason,
)


@dataclass(frozen=True, slots=True)
class ToRouter:
    """Send one event on the session of that number."""

    session: int
    event: PrefillEvent | DecodeEvent


# ---- the owner of blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToPuller:
    pull: int
    event: PullEvent


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Byte transports: send this block's bytes, then tell the core with `sent(pull, position)`."""

    pull: int
    handle: BlockHandle


@dataclass(frozen=True, slots=True)
class ClosePull:
    """The owner ends the stream of this pull, after what was sent before."""

    pull: int


@dataclass(frozen=True, slots=True)
class FreeTicket:
    """The outbox holds this ticket no more: its holder may give the blocks back."""

    ticket: int
    reason: Reason | None  # None: delivered


@dataclass(frozen=True, slots=True)
class HandOver:
    """`local` only, instead of FreeTicket: the blocks change owner in this step and nothing is copied.

    The holder of the ticket forgets its table without giving it back (BlockTable.hand_over) and passes the
    action on; the driver brings it to the decoder's `adopted(pull, blocks, now)` before anything else happens.
    """

    pull: int
    ticket: int
    blocks: Sequence[int]


# ---- the puller ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenPull:
    """Open a Pull stream to the owner at `address` and send `message` first.

    Before each write the driver asks the decoder for `destination(pull, position)` (its inbox knows), and when a
    block is complete for `block_tokens(pull, position)`, which the digest covers.
    """

    pull: int
    address: str
    message: PullOpen


@dataclass(frozen=True, slots=True)
class ToOwner:
    pull: int
    message: PullRequest


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """One-sided transports: copy these blocks out of their owner's memory, then report `copied` or `copy_failed`.

    As before a write, the driver asks for `destination(pull, position)` when the copy of a block is about to begin.
    """

    pull: int
    handles: Sequence[BlockHandle]


@dataclass(frozen=True, slots=True)
class CloseStream:
    """The puller ends the stream. The driver reports `pull_stream_closed` once no copy can still write."""

    pull: int
    reason: Reason | None = field(default=None, compare=False)  # for the counts: why the pull failed, if it did


@dataclass(frozen=True, slots=True)
class MeetPeers:
    """Pair with these owners of blocks, before a request needs one of them."""

    owners: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Announced:
    """These positions are sealed at the owner: bind destinations for them."""

    pull: int
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Landed:
    """These positions' bytes are in place and match what was announced."""

    pull: int
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ready:
    """Every block is validated and token 0 is known: the slot may run in the next step.

    With `first_token.finish_reason` set the request is over: Ready comes at once, whether or not blocks have
    landed, and Drained follows for the ones that were bound.
    """

    pull: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class Adopted:
    """`local` only, instead of Ready (unless token 0 ends the request): the slot may run in the next step.

    `blocks` are all of the sequence's blocks in order; their references are now the decoder's. A local pull
    brings no Announced and no Landed and needs no bind(): its slot waits, without blocks, until this comes.
    """

    pull: int
    blocks: Sequence[int]
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The pull is over without success. Its blocks drain until Drained names them."""

    pull: int
    reason: Reason
    facts: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Drained:
    """No copy can write into these blocks any more: only now may they be given back.

    Comes exactly once, with every bound block, after PullFailed, after cancel() and after a Ready whose token
    ends the request. An adoption that comes too late ends here too, with the blocks that moved.
    """

    pull: int
    blocks: Sequence[int]


Action = (
    ToRouter | ToPuller | SendBlock | ClosePull | FreeTicket | HandOver
    | OpenPull | ToOwner | CopyBlocks | CloseStream | MeetPeers
    | Announced | Landed | Ready | Adopted | PullFailed | Drained
)  # fmt: skip
