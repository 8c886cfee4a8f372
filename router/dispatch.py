"""All requests of one router: admission, the queue, placing on workers, pacing, credit. Sans-IO.

The driver calls in with events and the time (`tick` at least ten times a second) and carries out the actions
in order. Flows decide what an event means, suspects.py who may share a worker, policy.py which worker is best; this
file knows who waits for what.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

from engine.messages import (
    CacheChange,
    DecodeEvent,
    Failed,
    FirstToken,
    PrefillAccepted,
    PrefillEvent,
    Reason,
    Refused,
    StepBatch,
    WorkerHello,
    WorkerLoad,
)
from router import policy
from router.actions import Action, End, FlowAction, LinkFailed, RouterRequest
from router.admission import Closing, RouterConfig, TooLong, check_queue, check_resume, fit, limit_of
from router.flow import Flow
from router.suspects import Suspects
from router.workers import Role, Worker, Workers


class Dispatcher:
    def __init__(self, config: RouterConfig, rng: random.Random, now: float = 0.0) -> None:
        self.config = config
        self.workers = Workers(now)
        self.flows: dict[int, Flow] = {}  # oldest first
        self.links: Counter[tuple[str, str]] = Counter()  # failed copies by (prefill, decode) address
        self.picks: Counter[tuple[Role, str]] = Counter()  # placements by (role, address)
        self.setbacks: Counter[tuple[Role, Reason]] = Counter()  # what workers refused or failed
        self.lost: Counter[Role] = Counter()  # sessions to workers that ended
        self.ignored: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()  # by code
        self._rng = rng
        self._queue: dict[int, Flow] = {}  # beyond max_concurrent_requests, in order of arrival
        self._waiting: dict[int, Flow] = {}  # want a worker and have none
        self._held: dict[tuple[int, Role], str] = {}  # where each leg is, as the workers' job lists have it
        self._suspects = Suspects(self.flows)
        self._closing = False

    @property
    def idle(self) -> bool:
        return not self.flows

    @property
    def waiting(self) -> int:
        """Requests that no worker has: in the queue, or wanting a worker."""
        return len(self._queue.keys() | self._waiting.keys())

    # ---- the front ------------------------------------------------------------------------------------------

    def submit(self, request: RouterRequest, now: float) -> tuple[int, list[Action]]:
        """Raises admission.Rejected (Overloaded, TooLong, BadResume, Closing); then nothing was kept."""
        if self._closing:
            raise Closing("this router is shutting down", retry_after=1.0)
        check_resume(len(request.resume), request.params)
        params = request.params
        if (limit := limit_of(self.workers)) is not None:
            params = fit(len(request.prompt_ids), len(request.resume), params, limit)
        check_queue(len(self.flows) - len(self._queue), len(self._queue), self.config)
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._rng.getrandbits(64))
        number = self._rng.getrandbits(64)
        while number in self.flows or number == 0:
            number = self._rng.getrandbits(64)
        flow = Flow(number, request, self.config, self._rng, now)
        flow.params = params
        self.flows[number] = flow
        if len(self.flows) - len(self._queue) > self.config.max_concurrent_requests:
            self._queue[number] = flow
            return number, []
        return number, self._settle(flow, [], now)

    def cancel(self, request: int, now: float) -> list[Action]:
        flow = self.flows.get(request)
        return self._settle(flow, flow.cancel(now), now) if flow else []

    def stop(self, request: int, now: float) -> list[Action]:
        flow = self.flows.get(request)
        return self._settle(flow, flow.stop(now), now) if flow else []

    def consumed(self, request: int, index: int, now: float) -> list[Action]:
        """The client has taken every token below `index`."""
        if (flow := self.flows.get(request)) is None:
            return []
        told = flow.consumed_to(index, now)
        return told if flow.wants is None else self._settle(flow, told, now)  # one that waits may have waited for this

    def seed(self, request: int) -> int | None:
        """The seed in use, minted here if the request gave none; with it a client can resume."""
        flow = self.flows.get(request)
        return flow.params.seed if flow else None

    def close(self) -> None:
        """Takes no new request; those it has go on."""
        self._closing = True

    # ---- the workers ----------------------------------------------------------------------------------------

    def worker_up(self, address: str, role: Role, hello: WorkerHello, now: float) -> list[Action]:
        """A session is open. If one to this address was open before, it is over."""
        actions = self.worker_down(address, role, now)
        self.workers.up(address, role, hello, now)
        for flow in self.flows.values():
            flow.worker_returned(address, hello.node.incarnation)
        return actions + self._place_waiting(now)

    def worker_down(self, address: str, role: Role, now: float) -> list[Action]:
        worker = self.workers.down(address, role, now)
        if worker is None:
            return []
        self.lost[role] += 1
        carried = [self.flows[request] for request in worker.jobs]
        incarnation = worker.hello.node.incarnation
        aboard = len(carried)
        if role is Role.PREFILL:
            aboard += sum(flow.owner_lost(address, incarnation) for flow in self.flows.values())
        lost: list[tuple[Flow, list[FlowAction]]] = []
        for flow in carried:  # all first, so that nobody is placed by a half-told story
            self._held.pop((flow.request, role), None)
            told = flow.worker_lost(address, role, incarnation, now, alone=aboard == 1, heard_at=worker.heard_at)
            lost.append((flow, told))
        return [action for flow, told in lost for action in self._settle(flow, told, now)]

    def on_event(self, address: str, role: Role, event: PrefillEvent | DecodeEvent, now: float) -> list[Action]:
        worker = self.workers.get(address, role)
        if worker is None:
            self.ignored[type(event).__name__] += 1
            return []
        worker.heard_at = now
        match event:
            case StepBatch():
                return self._step(worker, event, now)
            case WorkerLoad():
                self.workers.report(worker, event, now)
                return []
            case CacheChange():
                worker.cache_changed(event)
                return []
        if isinstance(event, Refused | Failed):
            self.setbacks[role, event.reason] += 1
            if event.reason is Reason.DRAINING:
                self.workers.mark_draining(worker, now)
        flow = self.flows.get(event.key.request)
        if flow is None:
            self.ignored[type(event).__name__] += 1
            return []
        return self._settle(flow, self._tell(flow, address, role, event, now), now)

    def _tell(
        self, flow: Flow, address: str, role: Role, event: PrefillAccepted | FirstToken | Refused | Failed, now: float
    ) -> list[FlowAction]:
        match event:
            case PrefillAccepted():
                return flow.accepted(address, event, now)
            case FirstToken():
                return flow.first_token(address, role, event, now)
            case Refused():
                return flow.refused(address, role, event, now)
            case Failed():
                return flow.failed(address, role, event, now)

    def _step(self, worker: Worker, batch: StepBatch, now: float) -> list[Action]:
        actions: list[Action] = []
        jobs = worker.jobs
        for key, token in batch.rows:
            if (flow := self.flows.get(key.request)) is None:
                self.ignored["Row"] += 1
            elif (emit := flow.next_token(worker.address, key, token, now)) is not None:
                actions.append(emit)
                jobs[key.request] += 1
            else:
                actions += self._settle(flow, flow.row(worker.address, key, token, now), now)
        for finish in batch.finishes:
            if (flow := self.flows.get(finish.key.request)) is not None:
                actions += self._settle(flow, flow.finished(worker.address, finish, now), now)
            else:
                self.ignored["Finish"] += 1
        return actions

    # ---- time -----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for flow in list(self.flows.values()):
            if told := flow.tick(now):
                actions += self._settle(flow, told, now)
        return actions + self._place_waiting(now)

    def _place_waiting(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for flow in sorted(self._waiting.values(), key=lambda flow: flow.submitted_at):
            if flow.request in self._waiting:
                actions += self._settle(flow, [], now)
        return actions

    # ---- placing --------------------------------------------------------------------------------------------

    def _settle(self, flow: Flow, told: Sequence[FlowAction], now: float) -> list[Action]:
        """After every call into a flow: book where it is, place it if it wants a worker, forget it if it ended."""
        actions: list[Action] = []
        self._book(flow, told, actions)
        if flow.wants is not None and flow.request not in self._queue:
            self._waiting[flow.request] = flow
            self._book(flow, self._place(flow, now), actions)
        if flow.wants is None:
            self._waiting.pop(flow.request, None)
        self._suspects.review(flow)
        if flow.ended and self.flows.pop(flow.request, None) is not None:
            self._queue.pop(flow.request, None)
            self.ignored.update(flow.ignored)
            actions += self._promote(now)
        return actions

    def _book(self, flow: Flow, told: Sequence[FlowAction], actions: list[Action]) -> None:
        for action in told:
            if isinstance(action, LinkFailed):
                self.links[action.prefill, action.decode] += 1
            else:
                actions.append(action)
                if isinstance(action, End):
                    self.ended[action.outcome.code] += 1
        for role in Role:
            leg = flow.legs.get(role)
            held = self._held.get((flow.request, role))
            if held is not None and (leg is None or leg.address != held):
                del self._held[flow.request, role]
                if (worker := self.workers.get(held, role)) is not None:
                    worker.jobs.pop(flow.request, None)
            if leg is not None and (worker := self.workers.get(leg.address, role)) is not None:
                self._held[flow.request, role] = leg.address
                worker.jobs[flow.request] = len(flow.asked.prompt_ids) + len(flow.log)

    def _promote(self, now: float) -> list[Action]:
        if not self._queue or len(self.flows) - len(self._queue) >= self.config.max_concurrent_requests:
            return []
        request = next(iter(self._queue))
        return self._settle(self._queue.pop(request), [], now)

    def _place(self, flow: Flow, now: float) -> list[FlowAction]:
        role = flow.wants
        if role is None or now < flow.not_before:
            return []
        if flow.attempt == 0:
            # The first time, both stages must be there: their pools say what fits, and a prefill alone is no use.
            for each in Role:
                if self.workers.empty_since(each) is not None:
                    return self._without_worker(flow, each, now)
            if told := self._resolve(flow, now):
                return told
        elif role is Role.PREFILL and flow.unread:
            return []  # until its client reads, or is given up as too slow
        fitting = [worker for worker in self.workers.eligible(role) if worker.capacity >= flow.max_total]
        if not fitting:
            return self._without_worker(flow, role, now)
        if all(flow.refusals.get((role, worker.address)) is Reason.OUT_OF_BLOCKS for worker in fitting):
            sentence = f"no {role.value} worker has a pool for {flow.max_total} tokens"
            return flow.give_up(now, "RESOURCE_EXHAUSTED", sentence, {"tokens": str(flow.max_total)})
        rested = [worker for worker in fitting if flow.avoid.get((role, worker.address), now) <= now]
        company = self._suspects.company(flow, role, rested, self.workers.eligible(role))
        if role is Role.DECODE:
            chosen = policy.pick_decode(company, self._rng, flow.ticket.owner if flow.ticket else None)
            if chosen is None:
                return []
            self.picks[role, chosen.address] += 1
            return flow.start_decode(chosen.address, now)
        tokens = [*flow.asked.prompt_ids, *flow.log]
        known = len(company) > 1 and any(worker.hashes for worker in company)
        hashes = policy.prompt_hashes(company[0], flow.asked.namespace, tokens) if known else []
        chosen = policy.pick_prefill(company, tokens, hashes)
        if chosen is None:
            return []
        self.picks[role, chosen.address] += 1
        return flow.start_prefill(chosen.address, now)

    def _resolve(self, flow: Flow, now: float) -> list[FlowAction]:
        """max_tokens, if nobody was there to ask at submit; a request that turns out not to fit ends here."""
        limit = limit_of(self.workers)
        if limit is None:
            return []
        try:
            flow.params = fit(len(flow.asked.prompt_ids), len(flow.asked.resume), flow.params, limit)
        except TooLong as error:
            return flow.give_up(now, error.code, str(error), error.facts)
        return []

    def _without_worker(self, flow: Flow, role: Role, now: float) -> list[FlowAction]:
        config = self.config
        grace = config.restart_grace if self.workers.ever_up(role) else config.no_worker_grace
        since = self.workers.empty_since(role)
        if now - max(flow.wants_since, since or 0.0) < grace:
            return []
        sentence = f"no {role.value} worker that is up has room for {flow.max_total} tokens"
        if since is not None:
            sentence = self.workers.why_none(role)
        return flow.give_up(now, "UNAVAILABLE", sentence, {"role": role.value, "resumable": "true"})

    # ---- checks ---------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every leg is in its worker's job list and the other way round; nobody who ended is anywhere."""
        legs = {(flow.request, role): leg.address for flow in self.flows.values() for role, leg in flow.legs.items()}
        assert legs == self._held, f"legs {legs} are not the booked {self._held}"
        jobs = {(request, worker.role): worker.address for worker in self.workers.all() for request in worker.jobs}
        assert jobs == legs, f"jobs at workers {jobs} are not the legs {legs}"
        for name, group in (("queue", self._queue), ("waiting", self._waiting)):
            stray = group.keys() - self.flows.keys()
            assert not stray, f"requests {stray} ended and are still in the {name}"
        for flow in self.flows.values():
            placed = flow.legs or flow.wants is not None
            assert placed and not flow.ended, f"request {flow.request} is nowhere: nothing will ever move it"
            waits = flow.request in self._waiting or flow.request in self._queue
            assert (flow.wants is not None) == waits, f"request {flow.request} wants {flow.wants}, waiting is {waits}"
