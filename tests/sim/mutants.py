"""One rule removed at a time: what the simulator must notice. Each mutant patches one method of one core.

A mutant that survives means that a rule is not needed or that the simulator is blind to what it is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from decode_service.decoder import Decoder
from decode_service.scheduler import DecodeScheduler
from engine.blocks import BlockPool
from kvtransfer import inbox
from kvtransfer.actions import Drained, FreeTicket
from kvtransfer.inbox import Inbox
from kvtransfer.outbox import Outbox
from prefill_service.prefiller import Prefiller
from prefill_service.scheduler import PrefillScheduler
from router.dispatch import Dispatcher
from router.flow import Flow
from router.workers import Role
from tests.sim.world import World

Patches = dict[tuple[type, str], Any]


def no_index_check() -> Patches:
    """The router takes every row of a current leg."""

    def row(self: Flow, address: str, key: Any, token: Any, now: float) -> Any:
        leg = self._current(address, Role.DECODE, key, "Row")
        if leg is None:
            return []
        self._echoed(leg, now)
        return [self._accept(token, (), now)]

    def next_token(self: Flow, address: str, key: Any, token: Any, now: float) -> Any:
        return None  # every row is an unusual one

    def first_token(self: Flow, address: str, role: Any, event: Any, now: float) -> Any:
        leg = self._current(address, role, event.key, "FirstToken")
        if leg is None:
            return []
        actions: list[Any] = [self._accept(event.token, event.prompt_logprobs, now)]
        if role is Role.DECODE:
            self._echoed(leg, now)
        if event.finish_reason is not None:
            actions += self._end(now, event.finish_reason, stop_token_id=event.stop_token_id)
        return actions

    return {(Flow, "row"): row, (Flow, "next_token"): next_token, (Flow, "first_token"): first_token}


def no_cancel_at_the_end() -> Patches:
    """Legs are forgotten without a word to their workers."""

    def leave(self: Flow) -> list[Any]:
        self.legs.clear()
        self.ticket = None
        return []

    return {(Flow, "_leave"): leave}


def deaths_go_unnoticed() -> Patches:
    """A lost session is nobody's business."""
    return {(Flow, "worker_lost"): lambda self, *_, **__: []}


def resume_without_the_log() -> Patches:
    """A new attempt prefills the prompt alone and goes on counting."""
    return {(Flow, "token_ids"): property(lambda self: list(self.asked.prompt_ids))}


def free_while_copying() -> Patches:
    """Blocks of a failed pull return at once, although a copy may still write."""
    return {(inbox._Pull, "copying"): property(lambda self: False)}


def no_validation_after_the_copy() -> Patches:
    """Whatever bytes arrived count as right."""
    original = Inbox.copied

    def copied(self: Inbox, pull: int, digests: dict[int, int], now: float) -> Any:
        state = self._pulls.get(pull)
        known = state.announced if state else {}
        told = {at: known[at].digest if at in known else digest for at, digest in digests.items()}
        return original(self, pull, told, now)

    return {(Inbox, "copied"): copied}


def a_broken_pull_fails_nobody() -> Patches:
    """The end of a stream is not the end of its pull."""

    def stream_closed(self: Inbox, pull: int, now: float) -> Any:
        state = self._pulls.get(pull)
        if state is None or state.phase is not inbox._Phase.OVER:
            return []
        del self._pulls[pull]
        return [Drained(pull, tuple(state.bound.values()))] if state.draining else []

    return {(Inbox, "stream_closed"): stream_closed, (Inbox, "tick"): lambda self, now: []}


def blocks_are_given_twice() -> Patches:
    """Drained blocks go back once more."""
    original = Decoder._absorb

    def absorb(self: Decoder, actions: Any, now: float) -> Any:
        actions = list(actions)
        twice = [action for action in actions if isinstance(action, Drained)]
        return original(self, [*actions, *twice], now)

    return {(Decoder, "_absorb"): absorb}


def prefill_has_no_step_fence() -> Patches:
    """Blocks return while the step in flight still writes into them."""
    return {(PrefillScheduler, "is_in_flight"): lambda self, ticket: False}


def decode_has_no_step_fence() -> Patches:
    original = Decoder._forget

    def forget(self: Decoder, job: Any, now: float) -> None:
        original(self, job, now)
        for flight in self._flights:
            self.pool.give(flight.blocks)
            flight.blocks = []

    return {(Decoder, "_forget"): forget}


def sessions_leave_their_jobs() -> Patches:
    """The end of a session cancels nothing at the prefill worker."""

    def detach(self: Prefiller, session: int, now: float) -> Any:
        self.sessions.pop(session, None)
        return []

    return {(Prefiller, "detach"): detach}


def sessions_leave_their_slots() -> Patches:
    def detach(self: Decoder, session: int, now: float) -> Any:
        self.sessions.pop(session, None)
        return []

    return {(Decoder, "detach"): detach}


def tickets_never_expire() -> Patches:
    """The owner has no timer of its own."""
    return {(Outbox, "tick"): lambda self, now: []}


def promises_are_not_kept() -> Patches:
    """Decode admits as if every available block were free to take."""
    return {(DecodeScheduler, "unpromised"): property(lambda self: self.pool.available)}


def ready_before_everything_landed() -> Patches:
    """A slot runs as soon as token 0 is known."""
    return {(inbox._Pull, "complete"): property(lambda self: True), (Outbox, "_done"): _done_anyway}


def _done_anyway(self: Outbox, lease: Any, pull: Any, now: float) -> Any:
    del self._leases[lease.ticket.id]
    closing = [action for each in list(lease.pulls.values()) for action in self._close(lease, each)]
    return [*closing, FreeTicket(lease.ticket.id, None)]


def a_credit_is_never_sent() -> Patches:
    """A client that reads is not heard."""
    return {(Flow, "consumed_to"): lambda self, index, now: []}


def cached_blocks_are_not_referenced() -> Patches:
    """The pool forgets that a shared block has a second holder."""
    original = BlockPool.share

    def share(self: BlockPool, blocks: Iterable[int]) -> None:
        original(self, [block for block in blocks if self._refs[block] == 0])

    return {(BlockPool, "share"): share}


def restarts_are_not_placed_again() -> Patches:
    """Requests that wait are placed only when they are told something."""
    return {(Dispatcher, "_place_waiting"): lambda self, now: []}


MUTANTS: tuple[Callable[[], Patches], ...] = (
    no_index_check,
    no_cancel_at_the_end,
    deaths_go_unnoticed,
    resume_without_the_log,
    free_while_copying,
    no_validation_after_the_copy,
    a_broken_pull_fails_nobody,
    blocks_are_given_twice,
    prefill_has_no_step_fence,
    decode_has_no_step_fence,
    sessions_leave_their_jobs,
    sessions_leave_their_slots,
    tickets_never_expire,
    promises_are_not_kept,
    cached_blocks_are_not_referenced,
    restarts_are_not_placed_again,
    ready_before_everything_landed,
    a_credit_is_never_sent,
)


@contextlib.contextmanager
def applied(mutant: Callable[[], Patches]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for (owner, name), replacement in mutant().items():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def first_seed_that_notices(mutant: Callable[[], Patches], seeds: range) -> tuple[int, str] | None:
    """The seed and what it noticed. Any exception counts, a core that raises is a worker that dies; but not those
    that a mutant raises when it no longer fits the method that it replaces.
    """
    with applied(mutant):
        for seed in seeds:
            try:
                World(seed).run()
            except (TypeError, AttributeError, NameError):
                raise
            except Exception as error:
                return seed, f"{type(error).__name__}: {error}"
    return None
