"""One request's states over both legs, from the first PrefillStart to the one End. Sans-IO.

A flow owns the log of emitted tokens, the attempt and the placement, and decides what each event means. It
says where it wants to run (`wants`, not before `not_before`, rather not at `avoid`) and the dispatcher places
it; it never chooses a worker. A token counts only from the worker where the request is placed, for the current
attempt and placement, at the next index; everything else is counted in `ignored` and dropped.

    prefill leg:  none -> started -> accepted (a ticket) -> none, once the decode worker has echoed token 0
    decode leg:   none -> started -> running (echoed)
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.messages import (
    Cancel,
    Credit,
    DecodeStart,
    Failed,
    Finish,
    FirstToken,
    PrefillAccepted,
    PrefillStart,
    Reason,
    Refused,
    RequestKey,
    StageTimes,
    Ticket,
)
from engine.types import FinishReason, SamplingParams, Token, TokenLogprob
from router.actions import Action, Emit, End, FlowAction, LinkFailed, Outcome, RouterRequest, Times, ToWorker
from router.admission import RouterConfig
from router.credit import Window
from router.workers import Role

SUSPECT_DEATHS = 2  # after so many deaths a request runs among suspects alone
LONER_DEATHS = 3  # after so many it runs alone

# What a worker's final word means to the client, where no other worker can help.
FINAL_CODES = {
    Reason.DEADLINE: "DEADLINE_EXCEEDED",
    Reason.INVALID_FIELD: "INVALID_ARGUMENT",
    Reason.UNIMPLEMENTED: "UNIMPLEMENTED",
    Reason.OUT_OF_BLOCKS: "RESOURCE_EXHAUSTED",
}
REFUSED_FOR_GOOD = (Reason.DEADLINE, Reason.INVALID_FIELD, Reason.UNIMPLEMENTED, Reason.INTERNAL)
COPY_REASONS = (Reason.COPY_FAILED, Reason.STALE_TICKET, Reason.SUPERSEDED)


class LegState(enum.Enum):
    STARTED = 1
    ACCEPTED = 2  # prefill: the ticket is out
    RUNNING = 3  # decode: token 0 was echoed


@dataclass(slots=True)
class Leg:
    address: str
    key: RequestKey
    placed_at: float
    state: LegState = LegState.STARTED
    running_since: float | None = None  # decode: when token 0 was echoed


class Flow:
    """Where a request stands. The dispatcher reads the public fields and writes only `params`, before the start."""

    def __init__(
        self, request: int, asked: RouterRequest, config: RouterConfig, rng: random.Random, now: float
    ) -> None:
        self.request = request
        self.asked = asked
        self.params: SamplingParams = asked.params
        self.submitted_at = now
        self.deadline_at = now + asked.deadline
        self.log: list[int] = list(asked.resume)
        self.attempt = 0
        self.placement = 0
        self.base = len(self.log)  # len(log) when this attempt began: the index of the token that it prefills
        self.ticket: Ticket | None = None
        self.legs: dict[Role, Leg] = {}
        self.wants: Role | None = Role.PREFILL
        self.wants_since = now
        self.not_before = now
        self.avoid: dict[tuple[Role, str], float] = {}  # worker -> until when it is left alone
        self.refusals: dict[tuple[Role, str], Reason] = {}
        self.deaths: set[tuple[str, int]] = set()  # (address, incarnation) of workers that went with this on board
        self.failed_copies = 0
        self.failed_from: Counter[str] = Counter()  # those of them by the prefill worker that owned the blocks
        self.credit = Window(config.credit_window, len(self.log))
        self.ended = False
        self.ignored: Counter[str] = Counter()
        self._config = config
        self._rng = rng
        self._setbacks = 0
        self._cached_tokens = 0
        self._prompt_logprobs_sent = False
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._prefill_times = StageTimes()
        self._decode_times = StageTimes()

    # ---- placing --------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> list[int]:
        """What this attempt prefills: the prompt, then what was emitted before the attempt began."""
        return [*self.asked.prompt_ids, *self.log[: self.base]]

    @property
    def suspicion(self) -> int:
        """0: ordinary. 1: runs among suspects. 2: runs alone."""
        return 0 if len(self.deaths) < SUSPECT_DEATHS else 1 if len(self.deaths) < LONER_DEATHS else 2

    @property
    def max_total(self) -> int:
        """The most tokens that it ever has, prompt and output; 0 while max_tokens is not resolved."""
        return len(self.asked.prompt_ids) + self.params.max_tokens if self.params.max_tokens is not None else 0

    @property
    def unread(self) -> bool:
        """The client's window is used up: another attempt would hold blocks for what nobody takes."""
        return len(self.log) >= self.credit.consumed + self.credit.window

    def start_prefill(self, address: str, now: float) -> list[FlowAction]:
        assert self.wants is Role.PREFILL and not self.legs, f"request {self.request} is placed already"
        self.attempt += 1
        self.placement = 0
        self.base = len(self.log)
        key = RequestKey(self.request, self.attempt)
        self.legs[Role.PREFILL] = Leg(address, key, now)
        self.wants = None
        if self._started_at is None:
            self._started_at = now
        start = PrefillStart(
            key=key, token_ids=self.token_ids, emitted=self.base, params=self.params,
            deadline=max(0.0, self.deadline_at - now), age=now - self.submitted_at,
            cache_namespace=self.asked.namespace, request_id=self.asked.request_id, traceparent=self.asked.traceparent,
        )  # fmt: skip
        return [ToWorker(address, Role.PREFILL, start)]

    def start_decode(self, address: str, now: float) -> list[FlowAction]:
        """The ticket covers `base` tokens and no more; token `base` travels over the Pull, even if it is known here."""
        assert self.wants is Role.DECODE and self.ticket is not None, f"request {self.request} has nothing to decode"
        self.placement += 1
        key = RequestKey(self.request, self.attempt, self.placement)
        self.legs[Role.DECODE] = Leg(address, key, now)
        self.wants = None
        start = DecodeStart(
            key=key, ticket=self.ticket, token_ids=self.token_ids, emitted=self.base, params=self.params,
            deadline=max(0.0, self.deadline_at - now), age=now - self.submitted_at,
            until_index=self.credit.grant(), cache_namespace=self.asked.namespace,
            request_id=self.asked.request_id, traceparent=self.asked.traceparent,
        )  # fmt: skip
        return [ToWorker(address, Role.DECODE, start)]

    # ---- what workers say -----------------------------------------------------------------------------------

    def accepted(self, address: str, event: PrefillAccepted, now: float) -> list[FlowAction]:
        leg = self._current(address, Role.PREFILL, event.key, "PrefillAccepted")
        if leg is None or leg.state is not LegState.STARTED:
            return []
        leg.state = LegState.ACCEPTED
        self.ticket = event.ticket
        self._cached_tokens = max(self._cached_tokens, min(event.cached_tokens, len(self.asked.prompt_ids)))
        if self.params.max_tokens is None or self.params.max_tokens - self.base > 1:
            self._want(Role.DECODE, now)
        return []

    def first_token(self, address: str, role: Role, event: FirstToken, now: float) -> list[FlowAction]:
        """From either leg, whichever comes first. From the decode worker it also says that the slot runs there."""
        leg = self._current(address, role, event.key, "FirstToken")
        if leg is None:
            return []
        if event.token.index != self.base or leg.state is LegState.RUNNING:
            self.ignored["FirstToken"] += 1
            return []
        actions: list[FlowAction] = []
        if len(self.log) == self.base:
            self._prefill_times = _add(self._prefill_times, event.times)
            actions.append(self._accept(event.token, event.prompt_logprobs, now))
        elif role is Role.PREFILL:
            self.ignored["FirstToken"] += 1
        if event.finish_reason is not None:
            return actions + self._end(now, event.finish_reason, stop_token_id=event.stop_token_id)
        if role is Role.DECODE:
            self._echoed(leg, now)
        return actions

    def next_token(self, address: str, key: RequestKey, token: Token, now: float) -> Emit | None:
        """The usual row: the next token of the slot that runs there, which changes nothing but the log. Else None, and
        nothing is done: `row` is for all others."""
        leg = self.legs.get(Role.DECODE)
        if leg is None or leg.state is not LegState.RUNNING or leg.key != key or leg.address != address or self.ended:
            return None
        return self._accept(token, (), now) if token.index == len(self.log) else None

    def row(self, address: str, key: RequestKey, token: Token, now: float) -> list[FlowAction]:
        leg = self._current(address, Role.DECODE, key, "Row")
        if leg is None:
            return []
        if token.index > len(self.log):
            # A message of this leg was lost: nothing that it still says can be used.
            self.failed_copies += 1
            return self._next_attempt(now)
        if token.index < len(self.log):
            self.ignored["Row"] += 1
            return []
        self._echoed(leg, now)
        return [self._accept(token, (), now)]

    def finished(self, address: str, finish: Finish, now: float) -> list[FlowAction]:
        leg = self._current(address, Role.DECODE, finish.key, "Finish")
        if leg is None:
            return []
        del self.legs[Role.DECODE]
        self._decode_times = _add(self._decode_times, finish.times)
        return self._end(now, finish.reason, stop_token_id=finish.stop_token_id)

    def refused(self, address: str, role: Role, event: Refused, now: float) -> list[FlowAction]:
        """Nothing is held there: another worker, or the same one later. The ticket is still good."""
        leg = self._current(address, role, event.key, "Refused")
        if leg is None:
            return []
        del self.legs[role]
        if event.reason in REFUSED_FOR_GOOD:
            return self._final(event.reason, event.facts, now)
        if leg.state is not LegState.STARTED:  # it had taken the request on: what it did for it is lost
            return self._next_attempt(now)
        self.refusals[role, address] = event.reason
        self._setbacks += 1
        self.avoid[role, address] = now + max(event.retry_after, self._backoff())
        if role is Role.DECODE and event.reason in COPY_REASONS:
            return self._copy_failed(address, event.reason, now)
        self._want(role, now)
        return []

    def failed(self, address: str, role: Role, event: Failed, now: float) -> list[FlowAction]:
        leg = self._current(address, role, event.key, "Failed")
        if leg is None:
            return []
        del self.legs[role]
        if not event.resumable:
            return self._final(event.reason, event.facts, now)
        self.avoid[role, address] = now + self._backoff()
        if event.reason in COPY_REASONS and role is Role.DECODE:
            return self._copy_failed(address, event.reason, now)
        return self._next_attempt(now)

    def worker_lost(
        self, address: str, role: Role, incarnation: int, now: float, *, alone: bool, heard_at: float
    ) -> list[FlowAction]:
        """The session to a worker that holds a leg is gone, and all that it did for this request with it.

        `alone`: the worker ran nothing else of this router. `heard_at`: its last word; if that came before this
        request was placed there, the worker may have been dead already. A session that comes back with the same
        incarnation was no death (`worker_returned`).
        """
        leg = self.legs.get(role)
        if self.ended or leg is None or leg.address != address:
            return []
        guilty = alone and self.suspicion > 0 and heard_at > leg.placed_at
        self.deaths.add((address, incarnation))
        del self.legs[role]
        if guilty:
            sentence = f"{len(self.deaths)} workers went down while they ran this request, the last one ran only it"
            facts = {"deaths": str(len(self.deaths)), "resumable": "false"}
            return self._fail(now, "UNAVAILABLE", sentence, facts)
        if role is Role.DECODE and leg.state is LegState.STARTED and self.ticket is not None:
            if self._used >= self._config.max_attempts:
                return self._next_attempt(now)
            self._want(Role.DECODE, now)  # another placement of the same attempt, with the same ticket
            return []
        return self._next_attempt(now)

    def worker_returned(self, address: str, incarnation: int) -> None:
        self.deaths.discard((address, incarnation))

    def owner_lost(self, address: str, incarnation: int) -> bool:
        """A prefill worker is gone. Copies from it that failed before that was known make one death, no bad link.

        True if so: this request was on board, although it has left.
        """
        copies = self.failed_from.pop(address, 0)
        if copies:
            self.failed_copies -= copies
            self.deaths.add((address, incarnation))
        return copies > 0

    # ---- what the client and the clock say ------------------------------------------------------------------

    def consumed_to(self, index: int, now: float) -> list[Action]:
        """The client has taken every token below `index`."""
        if self.ended or not self.credit.read_to(min(index, len(self.log))):
            return []
        actions: list[Action] = []
        if self.credit.due and (leg := self.legs.get(Role.DECODE)) is not None:
            actions.append(ToWorker(leg.address, Role.DECODE, Credit(leg.key, self.credit.grant())))
        self._note_exhausted(now)
        return actions

    def cancel(self, now: float) -> list[FlowAction]:
        return self._end(now, FinishReason.CANCELLED, code="CANCELLED", sentence="the client cancelled the request")

    def stop(self, now: float) -> list[FlowAction]:
        """The front saw a stop string: what would come after it is not wanted. The worker that is cancelled says no
        times, so they are those that were seen from here."""
        leg = self.legs.get(Role.DECODE)
        if leg is not None and leg.running_since is not None:
            seen = StageTimes(0.0, now - leg.running_since, leg.running_since - leg.placed_at)
            self._decode_times = _add(self._decode_times, seen)
        return self._end(now, FinishReason.STOP)

    def tick(self, now: float) -> list[FlowAction]:
        if now >= self.deadline_at:
            sentence = f"the deadline of {self.asked.deadline:g} s passed after {len(self.log)} tokens"
            return self._fail(now, "DEADLINE_EXCEEDED", sentence, {"resumable": "true"}, Reason.DEADLINE)
        limit = self._config.slow_client
        if self.credit.exhausted_for(now) >= limit:
            unread = len(self.log) - self.credit.consumed
            sentence = f"slow consumer: nothing was read for {limit:g} s while {unread} tokens waited"
            return self._fail(now, "RESOURCE_EXHAUSTED", sentence, {"unread": str(unread), "resumable": "true"})
        return []

    def give_up(self, now: float, code: str, sentence: str, facts: Mapping[str, str]) -> list[FlowAction]:
        """The dispatcher can place it nowhere."""
        return self._fail(now, code, sentence, facts)

    # ---- inside ---------------------------------------------------------------------------------------------

    @property
    def _used(self) -> int:
        return len(self.deaths) + self.failed_copies

    def _current(self, address: str, role: Role, key: RequestKey, kind: str) -> Leg | None:
        leg = self.legs.get(role)
        if self.ended or leg is None or leg.address != address or leg.key != key:
            self.ignored[kind] += 1
            return None
        return leg

    def _echoed(self, leg: Leg, now: float) -> None:
        """The slot runs, so everything was pulled and the prefill worker has freed: nothing is owed to it."""
        leg.state = LegState.RUNNING
        if leg.running_since is None:
            leg.running_since = now
        self.legs.pop(Role.PREFILL, None)
        self.ticket = None

    def _accept(self, token: Token, prompt_logprobs: Sequence[TokenLogprob], now: float) -> Emit:
        self.log.append(token.token_id)
        if self._first_token_at is None:
            self._first_token_at = now
        shown: Sequence[TokenLogprob] = ()
        if prompt_logprobs and not self._prompt_logprobs_sent:
            shown = prompt_logprobs[: len(self.asked.prompt_ids)]  # a resume computes those of its output too
            self._prompt_logprobs_sent = True
        self._note_exhausted(now)
        return Emit(self.request, (token,), shown, self._cached_tokens)

    def _note_exhausted(self, now: float) -> None:
        self.credit.note(len(self.log), Role.DECODE in self.legs, now)

    def _copy_failed(self, decode: str, reason: Reason, now: float) -> list[FlowAction]:
        actions: list[FlowAction] = []
        owner = self.legs.get(Role.PREFILL)
        if owner is not None:
            actions.append(LinkFailed(owner.address, decode))
            self.avoid[Role.PREFILL, owner.address] = now + self._backoff()  # it may be dead and not yet known to be
        # A later placement may find the ticket taken by the worker that died: that loss is counted already.
        if reason is Reason.COPY_FAILED or self.placement == 1:
            self.failed_copies += 1
            if owner is not None:
                self.failed_from[owner.address] += 1
        return actions + self._next_attempt(now)

    def _next_attempt(self, now: float) -> list[FlowAction]:
        """Prefill again, with everything emitted so far. The first time at once, then paced."""
        actions = self._leave()
        if self._used >= self._config.max_attempts:
            sentence = f"{self._used} workers or copies failed under this request, after {len(self.log)} tokens"
            facts = {"attempts": str(self._used), "resumable": "true"}
            return actions + self._fail(now, "UNAVAILABLE", sentence, facts)
        self._want(Role.PREFILL, now)
        self.not_before = now if self._setbacks == 0 else now + self._backoff()
        self._setbacks += 1
        return actions

    def _want(self, role: Role, now: float) -> None:
        self.wants = role
        self.wants_since = self.not_before = now

    def _backoff(self) -> float:
        most = min(self._config.backoff_most, self._config.backoff_first * 2 ** min(self._setbacks, 16))
        return most * self._rng.uniform(0.5, 1.0)

    def _leave(self) -> list[FlowAction]:
        """Cancel what still holds something for this request; whoever said its last word is gone from `legs`."""
        actions: list[FlowAction] = [ToWorker(leg.address, role, Cancel(leg.key)) for role, leg in self.legs.items()]
        self.legs.clear()
        self.ticket = None
        return actions

    def _final(self, reason: Reason, facts: Mapping[str, str], now: float) -> list[FlowAction]:
        code = FINAL_CODES.get(reason, "INTERNAL")
        facts = {**facts}
        sentence = "a worker ended this request: " + reason.name.lower().replace("_", " ")
        if code == "INTERNAL":
            facts.setdefault("error_id", f"{self._rng.getrandbits(64):016x}")
            sentence = f"a worker failed; the error id is {facts['error_id']}"
        return self._fail(now, code, sentence, facts, reason)

    def _fail(
        self, now: float, code: str, sentence: str, facts: Mapping[str, str], reason: Reason | None = None
    ) -> list[FlowAction]:
        facts = {"tokens_emitted": str(len(self.log)), **facts}
        return self._end(now, FinishReason.ERROR, code=code, sentence=sentence, facts=facts, reason=reason)

    def _end(
        self,
        now: float,
        finish_reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        code: str = "OK",
        sentence: str = "",
        facts: Mapping[str, str] | None = None,
        reason: Reason | None = None,
    ) -> list[FlowAction]:
        if self.ended:
            return []
        actions = self._leave()
        self.ended = True
        self.wants = None
        outcome = Outcome(
            finish_reason, len(self.asked.prompt_ids), len(self.log), self._cached_tokens, self.times(now),
            stop_token_id, code, sentence, reason, facts or {},
        )  # fmt: skip
        return [*actions, End(self.request, outcome)]

    def times(self, now: float) -> Times:
        """What the stages took that are over; the one that lasts is not in it."""
        started = now if self._started_at is None else self._started_at
        first = None if self._first_token_at is None else self._first_token_at - self.submitted_at
        prefill, decode = self._prefill_times, self._decode_times
        return Times(
            started - self.submitted_at + prefill.queued, prefill.computed,
            prefill.transferred + decode.transferred, decode.queued, decode.computed, first,
            placed=started - self.submitted_at,
        )  # fmt: skip


def _add(left: StageTimes, right: StageTimes) -> StageTimes:
    return StageTimes(*(a + b for a, b in zip(left, right, strict=True)))
