"""What was seen of one request, and what every way to send one has to do. Times are time.perf_counter seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.serve.lengths import Job


@dataclass(slots=True)
class Record:
    """`error` is empty until something failed; then the other fields tell how far it came."""

    job: Job
    due: float = 0.0  # when the schedule wanted it sent
    released: float = 0.0  # when the clock let it go; the difference is our own lateness
    sent: float = 0.0  # when it was sent, after it waited for --max-concurrency
    chunk_times: list[float] = field(default_factory=list)  # of chunks that held tokens
    chunk_tokens: list[int] = field(default_factory=list)  # tokens in each; 0 where the server does not tell
    prompt_len: int = 0
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent if self.ok else 0.0

    @property
    def latency(self) -> float:
        """To the last token, and not to the end of the stream."""
        return self.chunk_times[-1] - self.sent if self.ok else 0.0

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks."""
        if not self.ok:
            return []
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    def add(self, now: float, tokens: int, text: str) -> None:
        self.chunk_times.append(now)
        self.chunk_tokens.append(tokens)
        self.text += text


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server says of itself."""

    model: str
    max_model_len: int | None


class Target(Protocol):
    """A server under load. Every method but `send` raises BenchError; none is retried."""

    backend: str  # under this name the results are kept

    async def facts(self) -> Facts: ...

    async def tokenize(self, text: str) -> list[int] | None:
        """Without special tokens. None: this server has no such call."""

    async def send(self, record: Record) -> None:
        """Fills the record; whatever goes wrong becomes its error, as `REASON: sentence`."""

    async def close(self) -> None: ...
