"""A worker process without an engine: it speaks a worker's sessions and paces tokens as an engine's steps would.

`python -m benchmarks.fake_worker --role decode ...`. A prefill worker accepts at once and says token 0; a decode worker
makes one token for every sequence each `--step` seconds and sends one message for all of them, within their credit.
The first token of a prompt is the stream's number, the second in how many steps it gets a token. What was sent of which
stream, and when, is written to `--record` at the end. Never computes anything and moves no KV.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from engine.messages import (
    Cancel,
    Credit,
    DecodeStart,
    Finish,
    FirstToken,
    KvLayout,
    Node,
    PrefillAccepted,
    PrefillStart,
    RequestKey,
    RouterHello,
    Row,
    StageTimes,
    StepBatch,
    Ticket,
    WorkerHello,
    WorkerLoad,
)
from engine.types import FinishReason, Token
from protos import worker_pb2_grpc
from wire import codec
from wire.channel import open_server, write
from wire.ports import bind
from wire.security import Security
from wire.session import Outbound, serve
from wire.worker import leave

BLOCKS, BLOCK_SIZE, LENGTH = 2**20, 16, 8192
TIMES = StageTimes(0.001, 0.001, 0.0)


@dataclass(slots=True)
class Job:
    key: RequestKey
    stream: int
    index: int
    until_index: int
    max_tokens: int
    every: int  # steps to a token


@dataclass(slots=True)
class Fake:
    """One worker's state: a wire.session.Worker. `words` are the token ids that it says, in turn."""

    words: Sequence[int]
    node: Node
    outbound: Outbound[Any] | None = None
    jobs: dict[int, Job] = field(default_factory=dict)
    sent: dict[int, list[float]] = field(default_factory=dict)  # stream: when each token from index 1 on was sent
    cancelled: dict[int, float] = field(default_factory=dict)  # stream: when its Cancel came
    steps: int = 0

    def session_opened(self, hello: RouterHello, outbound: Outbound[Any]) -> None:
        self.outbound = outbound

    def session_closed(self, session: int, outbound: Outbound[Any]) -> None:
        self.jobs.clear()

    def session_command(self, session: int, command: Any) -> None:
        assert self.outbound is not None, "a session that was opened has one"
        match command:
            case PrefillStart(key=key, token_ids=prompt):
                ticket = Ticket(key.request, self.node, len(prompt), 1, 60.0)
                self.outbound.put(PrefillAccepted(key, ticket, 0))
                last = FinishReason.LENGTH if command.params.max_tokens == 1 else None
                self.outbound.put(FirstToken(key, Token(0, self._word(prompt[0], 0)), last, times=TIMES))
            case DecodeStart(key=key, token_ids=prompt):
                self.outbound.put(FirstToken(key, Token(0, self._word(prompt[0], 0))))
                most = command.params.max_tokens or LENGTH
                self.jobs[key.request] = Job(key, prompt[0], 1, command.until_index, most, prompt[1])
                self.sent[prompt[0]] = []
            case Credit(key=key):
                if (job := self.jobs.get(key.request)) is not None:
                    job.until_index = command.until_index
            case Cancel(key=key):
                if (job := self.jobs.pop(key.request, None)) is not None:
                    self.cancelled[job.stream] = time.monotonic()

    def load(self) -> WorkerLoad:
        return WorkerLoad(running=len(self.jobs), free_blocks=BLOCKS - len(self.jobs))

    def step(self) -> None:
        rows, finishes, now = [], [], time.monotonic()
        self.steps += 1
        for job in list(self.jobs.values()):
            if job.index >= job.until_index or (self.steps + job.stream) % job.every:
                continue
            rows.append(Row(job.key, Token(job.index, self._word(job.stream, job.index))))
            self.sent[job.stream].append(now)
            job.index += 1
            if job.index == job.max_tokens:
                finishes.append(Finish(job.key, FinishReason.LENGTH, None, TIMES))
                del self.jobs[job.key.request]
        if rows and self.outbound is not None:
            self.outbound.put(StepBatch(self.steps, rows, finishes))

    async def run(self, seconds: float) -> None:
        """A step every so often, by the clock: a late one does not move those after it."""
        due = time.monotonic()
        while True:
            due = max(due + seconds, time.monotonic() - seconds)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.step()

    def _word(self, stream: int, index: int) -> int:
        return self.words[(7 * stream + index) % len(self.words)]


class Servicer:
    def __init__(self, role: str, fake: Fake, hello: WorkerHello) -> None:
        self._fake = fake
        self._hello = hello
        self._from_pb: Any = codec.prefill_command_from_pb if role == "prefill" else codec.decode_command_from_pb
        self._to_pb: Any = codec.prefill_event_to_pb if role == "prefill" else codec.decode_event_to_pb

    async def Attach(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        async for event in serve(requests, context, self._hello, self._fake, self._from_pb, self._to_pb):
            await write(context, event)


async def run(arguments: argparse.Namespace) -> None:
    words = json.loads(arguments.words.read_text())
    server = open_server(Security(), internal=True)
    port = bind(server, "127.0.0.1", 0, Security())
    node = Node(f"fake-{arguments.role}", secrets.randbits(64), f"127.0.0.1:{port}")
    layout = KvLayout(bytes.fromhex(arguments.digest), "float32", BLOCK_SIZE, 1, 1, 64, 8192, "fake")
    fake = Fake(words, node)
    servicer: Any = Servicer(arguments.role, fake, WorkerHello(node, layout, BLOCKS, 4096, LENGTH))
    add: Any = getattr(worker_pb2_grpc, f"add_{arguments.role.title()}ServiceServicer_to_server")
    add(servicer, server)
    await server.start()
    print(json.dumps({"address": node.address}), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pacing = asyncio.create_task(fake.run(arguments.step))
    await stop.wait()
    pacing.cancel()
    arguments.record.write_text(json.dumps({"sent": fake.sent, "cancelled": fake.cancelled}))
    leave(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--digest", required=True, help="the model's, in hex: what the router expects")
    parser.add_argument("--words", type=Path, required=True, help="a JSON list of token ids")
    parser.add_argument("--step", type=float, default=1 / 32, help="seconds between the tokens of a sequence")
    parser.add_argument("--record", type=Path, required=True)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
