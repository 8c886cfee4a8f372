"""One request at a decode worker, from DecodeStart to its last token: what the scheduler need not know.

Owns no block: those are its slot's. Changes only in the decoder's hands. Times are on the worker's monotonic
clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from decode_service.scheduler import Slot
from engine.batch import Row, SampleInput
from engine.messages import DecodeStart, Failed, FirstToken, Reason, StageTimes
from engine.types import Token
from kvtransfer.actions import ToRouter
from kvtransfer.jobs import JobKey


@dataclass(slots=True, eq=False)
class Job:
    """`prompt` is the client's own, `output` everything emitted since, over all attempts.

    `until_index` is the first token that no step may produce: there is no credit for it, or the request is over before.
    `ends` are the ids that may end it earlier. `pull` is set while the pull may still speak. `digest` is the chain
    digest of the last full block so far.
    """

    session: int
    start: DecodeStart
    slot: Slot
    digest: bytes
    arrived: float
    deadline_at: float
    prompt: Sequence[int]
    output: list[int]
    ends: frozenset[int]
    until_index: int = 0
    pull: int | None = None
    announced: list[int] = field(default_factory=list)  # sealed at the owner, and not bound yet
    landed: set[int] = field(default_factory=set)
    path: str = ""  # how its blocks come, and why not by a better way
    first: FirstToken | None = None  # of adopted blocks that wait for their turn
    admitted: float | None = None
    running_since: float | None = None
    no_credit_since: float | None = None  # of a running slot, as the last tick saw it
    over: bool = False
    rows: Iterator[Row] = iter(())  # of a running slot
    ahead: int = 0  # steps in flight that have a row of it
    covered: int = 0  # positions for which the newest of them had blocks

    @property
    def key(self) -> JobKey:
        return self.session, self.start.key

    @property
    def has_credit(self) -> bool:
        """For the next token that a step here would produce; token 0 of the attempt is the prefill's."""
        return max(len(self.output), self.start.emitted + 1) < self.until_index

    def grant(self, until_index: int) -> None:
        """Credit, which is absolute: less than before takes nothing away."""
        self.until_index = max(self.until_index, min(until_index, self.start.params.max_tokens or until_index))

    def accept(self, token: Token) -> None:
        """The sequence grows by a token, which the next step feeds."""
        self.output.append(token.token_id)
        self.slot.length = len(self.prompt) + len(self.output)
        self.slot.credit = len(self.output) < self.until_index

    def tokens(self, first: int, end: int) -> list[int]:
        """Positions [first, end) of the sequence."""
        split = len(self.prompt)
        return [*self.prompt[first:end], *self.output[max(0, first - split) : max(0, end - split)]]

    def runs(self, eos: frozenset[int], depth: int) -> None:
        """Its blocks are in place. Rows are used again, in turn: none is touched while its step is in flight."""
        slot, params = self.slot, self.start.params
        samples = [SampleInput(params, 0, self.prompt, self.output, eos) for _ in range(depth)]
        self.rows = cycle([Row(slot.seat, (), 0, slot.blocks, sample) for sample in samples])

    def row(self, room: int) -> Row | None:
        """The next step's work: the newest token, at the last position; only the runner knows a token in flight.

        None without credit or, in the `room` positions of its blocks, a place. While a step of it is in flight: if that
        one is its last, or left the runner without a block.
        """
        ahead, slot = self.ahead, self.slot
        index, length = len(self.output) + ahead, slot.length + ahead
        if index >= self.until_index or length > (self.covered if ahead else room):
            return None
        row = next(self.rows)
        assert row.sample is not None, f"{self.key} does not sample"
        row.tokens, row.start, row.sample.index = () if ahead else self.output[-1:], length - 1, index
        self.ahead, self.covered = ahead + 1, room
        return row

    def times(self, now: float) -> StageTimes:
        admitted = now if self.admitted is None else self.admitted
        running = now if self.running_since is None else self.running_since
        return StageTimes(queued=admitted - self.arrived, computed=now - running, transferred=running - admitted)


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was given to the runner and not reported yet. `blocks` go back when it is: their jobs are over."""

    jobs: list[Job]
    blocks: list[int] = field(default_factory=list)


def echo(job: Job, first: FirstToken) -> ToRouter:
    """Token 0 again, under this placement's key: the sign that the slot runs here."""
    return ToRouter(job.session, replace(first, key=job.start.key))


def failed(job: Job, reason: Reason, *, resumable: bool, facts: Mapping[str, str] | None = None) -> ToRouter:
    return ToRouter(job.session, Failed(job.start.key, reason, resumable, dict(facts or {})))
