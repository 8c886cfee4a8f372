"""One process, one pool: blocks change owner and nothing is copied.

LocalPair is the driver between a prefiller and a decoder that share a BlockPool. It carries each one's actions
to the other at once, in order, on the loop, so a table's references move from ticket to slot in one step and no
audit can see them in between. It keeps no state but which pulls are open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.messages import PullEvent, PullRequest
from kvtransfer.actions import Action, ClosePull, CloseStream, HandOver, OpenPull, SendBlock, ToOwner, ToPuller


class OwnerCore(Protocol):
    """The prefiller, or an Outbox."""

    def pull_message(self, pull: int, message: PullRequest, now: float) -> list[Action]: ...
    def pull_closed(self, pull: int, now: float) -> list[Action]: ...


class PullerCore(Protocol):
    """The decoder."""

    def pull_event(self, pull: int, event: PullEvent, now: float) -> list[Action]: ...
    def adopted(self, pull: int, blocks: Sequence[int], now: float) -> list[Action]: ...
    def pull_stream_closed(self, pull: int, now: float) -> list[Action]: ...


class LocalPair:
    """Pulls of other transports, and everything else that is not between the two, pass through untouched.

    The owner knows a local pull by a negative number, so that it never meets one of its servicer's.
    """

    def __init__(self, owner: OwnerCore, puller: PullerCore) -> None:
        self._owner = owner
        self._puller = puller
        self._open: set[int] = set()  # pull ids as the puller knows them

    def carry(self, actions: Iterable[Action], now: float) -> list[Action]:
        """Carries out what is local, and all that follows from it; returns the rest in order."""
        todo = deque(actions)
        rest: list[Action] = []
        while todo:
            action = todo.popleft()
            follow = self._step(action, now)
            if follow is None:
                rest.append(action)
            else:
                todo.extendleft(reversed(follow))  # before anything else: one action's effects stay together
        return rest

    def _step(self, action: Action, now: float) -> list[Action] | None:
        match action:
            case OpenPull(pull=pull, message=message) if message.transport == "local":
                self._open.add(pull)
                return self._owner.pull_message(-pull, message, now)
            case ToOwner(pull=pull, message=request) if pull in self._open:
                return self._owner.pull_message(-pull, request, now)
            case CloseStream(pull=pull) if pull in self._open:
                return self._closed(pull, now)
            case ToPuller(pull=pull, event=event) if pull < 0:
                return self._puller.pull_event(-pull, event, now) if -pull in self._open else []
            case HandOver(pull=pull, blocks=blocks):
                return self._puller.adopted(-pull, blocks, now)
            case ClosePull(pull=pull) if pull < 0:
                return self._closed(-pull, now) if -pull in self._open else []
            case SendBlock(pull=pull):
                assert pull >= 0, "a local pull never copies"
        return None

    def _closed(self, pull: int, now: float) -> list[Action]:
        self._open.discard(pull)
        return [*self._owner.pull_closed(-pull, now), *self._puller.pull_stream_closed(pull, now)]
