"""kill -9 under running streams, over and over: `python tests/kill_workers.py --role decode --kills 50`.

Each round starts one stream, finds the worker that runs it by the processor time that it uses, kills that worker,
and compares the whole answer with an unbroken run of the same request: same tokens, same text, no index twice or
missing. A decode worker dies in mid-stream, a prefill worker before the first token. A round whose fault came too
late (the stream was over, or token 0 was out) proves nothing: it is repeated and counted apart. After every round
the dead worker is started again, and at the end every worker must be idle with all its blocks free.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import psutil
from cluster import Cluster, running_cluster

from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc

STREAM_SECONDS = 120.0


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0


def request_for(round_number: int, prompt_tokens: int, max_tokens: int, vocab: int) -> gpb.GenerateStreamRequest:
    """Every round has its own prompt (no cached prefix shortens it); every second one samples with penalties."""
    rng = random.Random(round_number)
    sampling = gpb.SamplingParams(temperature=0)
    if round_number % 2:
        sampling = gpb.SamplingParams(
            temperature=0.8, top_p=0.95, seed=round_number, repetition_penalty=1.1, frequency_penalty=0.2
        )
    return gpb.GenerateStreamRequest(
        request=gpb.GenerateRequest(
            token_ids=gpb.TokenIds(ids=[rng.randrange(vocab) for _ in range(prompt_tokens)]),
            sampling=sampling,
            stopping=gpb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
            output=gpb.OutputOptions(return_text=True, return_token_ids=True),
        )
    )


class Stream:
    """One streamed request and what has come of it so far."""

    def __init__(self, channel: grpc.aio.Channel, request: gpb.GenerateStreamRequest) -> None:
        self.answer = Answer()
        self.finished = False
        self._call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request, timeout=STREAM_SECONDS)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._call:
                kind = message.WhichOneof("event")
                if kind == "delta":
                    self.answer.token_ids.extend(message.delta.token_ids)
                    self.answer.text += message.delta.text
                    self.answer.finish_reason = message.delta.finish_reason or self.answer.finish_reason
                self.finished = self.finished or kind == "finished"
        finally:
            self._call.cancel()

    async def whole(self) -> Answer:
        await self._task
        assert self.finished, "the stream ended without its last word"
        return self.answer

    @property
    def over(self) -> bool:
        return self._task.done()

    async def until_tokens(self, count: int) -> None:
        while len(self.answer.token_ids) < count and not self.over:
            await asyncio.sleep(0.002)


def busiest(cluster: Cluster, role: str, used_before: dict[str, float]) -> str:
    used = processor_seconds(cluster, role)
    return max(used, key=lambda name: used[name] - used_before.get(name, 0.0))


def processor_seconds(cluster: Cluster, role: str) -> dict[str, float]:
    result = {}
    for name, process in cluster.processes.items():
        if name.startswith(role):
            times = psutil.Process(process.pid).cpu_times()
            result[name] = times.user + times.system
    return result


async def decode_round(
    cluster: Cluster, channel: grpc.aio.Channel, request: gpb.GenerateStreamRequest
) -> Answer | None:
    """None: the stream was over before the kill."""
    before = processor_seconds(cluster, "decode")
    stream = Stream(channel, request)
    max_tokens = request.request.stopping.max_tokens
    await stream.until_tokens(random.randrange(2, max_tokens * 2 // 3))
    await asyncio.sleep(0.05)  # processor time is counted in steps of 10 ms
    victim = busiest(cluster, "decode", before)
    seen = len(stream.answer.token_ids)
    cluster.kill(victim)
    too_late = stream.over or seen >= max_tokens - 2
    answer = await stream.whole()
    cluster.start(victim)
    return None if too_late else answer


async def prefill_round(
    cluster: Cluster, channel: grpc.aio.Channel, request: gpb.GenerateStreamRequest
) -> Answer | None:
    """None: token 0 was out before the kill."""
    before = processor_seconds(cluster, "prefill")
    stream = Stream(channel, request)
    await asyncio.sleep(random.uniform(0.06, 0.25))
    victim = busiest(cluster, "prefill", before)
    too_late = bool(stream.answer.token_ids)
    cluster.kill(victim)
    answer = await stream.whole()
    cluster.start(victim)
    return None if too_late else answer


async def all_idle(cluster: Cluster, seconds: float = 15.0) -> str:
    """ "" once every worker that is up holds no block and runs nothing, else what is left."""
    deadline = time.monotonic() + seconds
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while True:
            info = await stub.GetServerInfo(gpb.GetServerInfoRequest(), timeout=5)
            busy = [
                f"{w.role} {w.address}: running {w.running}, waiting {w.waiting}, leased {w.leased_blocks}, "
                f"free {w.free_blocks} of {w.total_blocks}"
                for w in info.workers
                if w.running or w.waiting or w.leased_blocks or w.free_blocks != w.total_blocks
            ]
            expected = len(cluster.processes) - 1
            missing = expected - len(info.workers)
            if not busy and not missing:
                return ""
            if time.monotonic() > deadline:
                return "; ".join(busy) + (f"; {missing} workers are missing" if missing else "")
            await asyncio.sleep(0.2)


async def run(cluster: Cluster, role: str, kills: int, prompt_tokens: int, max_tokens: int, vocab: int) -> int:
    """The number of rounds that went wrong. Prints a line for each round."""
    kill_one = {"decode": decode_round, "prefill": prefill_round}[role]
    wrong = proven = attempt = 0
    slowest = 0.0
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        while proven < kills and attempt < 3 * kills + 10:
            attempt += 1
            request = request_for(attempt, prompt_tokens, max_tokens, vocab)
            started = time.monotonic()
            broken = await kill_one(cluster, channel, request)
            took = time.monotonic() - started
            names = [name for name in cluster.programs if name != "router"]
            await asyncio.to_thread(cluster.wait_ready, *names)
            if broken is None:
                print(f"round {attempt}: the kill came too late, repeated", flush=True)
                continue
            proven += 1
            slowest = max(slowest, took)
            unbroken = await Stream(channel, request).whole()
            good = broken == unbroken and len(broken.token_ids) == max_tokens
            wrong += not good
            print(f"kill {proven} of {kills}: {'equal' if good else 'DIFFERENT'}, {took:.2f} s", flush=True)
            if not good:
                print(f"  broken   {broken}\n  unbroken {unbroken}", flush=True)
    left = await all_idle(cluster)
    equal = f"{role}: {proven - wrong} of {kills} kills left the answer equal"
    print(f"{equal}; slowest {slowest:.2f} s; left: {left or 'nothing'}")
    return wrong + (kills - proven) + bool(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["decode", "prefill"], required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--prompt-tokens", type=int, help="default: 40 for decode, 3000 for prefill")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=250, help="prompts are drawn from the token ids below this")
    arguments = parser.parse_args()
    prompt_tokens = arguments.prompt_tokens or {"decode": 40, "prefill": 3000}[arguments.role]
    topology = {"prefill": 1, "decode": 2} if arguments.role == "decode" else {"prefill": 2, "decode": 1}
    if arguments.role == "prefill":
        topology["max_num_batched_tokens"] = 64  # a long prefill of many steps, so that the kill falls into it
    with (
        tempfile.TemporaryDirectory() as logs,
        running_cluster(Path(logs), model=arguments.model, **topology) as cluster,
    ):
        return asyncio.run(
            run(cluster, arguments.role, arguments.kills, prompt_tokens, arguments.max_tokens, arguments.vocab)
        )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
