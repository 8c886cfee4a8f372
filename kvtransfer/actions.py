"""What the workers' sans-IO cores ask their driver to do, as plain values.

A core never performs an action: it returns a list, and the driver (a servicer, or the simulator) carries
the list out in order. Notices (Announced, Landed, Ready, PullFailed, Drained) go from the inbox to the
decoder inside one process and never reach a driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import (
    BlockHandle,
    DecodeEvent,
    FirstToken,
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


# ---- the puller ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenPull:
    """Open a Pull stream to the owner at `address` and send `message` first."""

    pull: int
    address: str
    message: PullOpen


@dataclass(frozen=True, slots=True)
class ToOwner:
    pull: int
    message: PullRequest


@dataclass(frozen=True, slots=True)
class CloseStream:
    """The puller ends the stream. The driver reports `pull_stream_closed` once no copy can still write."""

    pull: int


@dataclass(frozen=True, slots=True)
class Announced:
    """These positions are sealed at the owner: bind destinations for them."""

    pull: int
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Landed:
    """This position's bytes are in place and match what was announced."""

    pull: int
    position: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Every block is validated and token 0 is known: the slot may run in the next step."""

    pull: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The pull is over without success. Its blocks drain until Drained names them."""

    pull: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Drained:
    """No copy can write into these blocks any more: only now may they be given back."""

    pull: int
    blocks: Sequence[int]


Action = (
    ToRouter | ToPuller | SendBlock | ClosePull | FreeTicket
    | OpenPull | ToOwner | CloseStream | Announced | Landed | Ready | PullFailed | Drained
)  # fmt: skip
