"""A router's front over real gRPC, with workers made of values: no model, no Attach, tokens from a script.

The tokenizer is a byte-level BPE of 256 bytes, a few merges and two special tokens, so that every text can be
encoded and characters are split over tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

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
    Row,
    StageTimes,
    StepBatch,
    Ticket,
    WorkerHello,
)
from engine.types import FinishReason, SamplingParams, Token, TokenLogprob
from router import border, front
from router.actions import ToWorker
from router.admission import RouterConfig
from router.dispatch import Dispatcher
from router.driver import Driver
from router.metrics import Counts
from router.servicer import GenerationService
from router.text.model import TextModel
from router.workers import Role
from wire.channel import open_server
from wire.health import Health
from wire.security import Security

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tools are not known') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ã", "©"))
SPECIAL = ("<|im_start|>", "<|im_end|>")
LAYOUT = KvLayout(b"model", "float32", 16, 2, 2, 64, 1024, "fake")
HELLO = WorkerHello(Node("fake", 7, "127.0.0.1:1"), LAYOUT, total_blocks=64, max_num_seqs=8, max_model_len=512)


def make_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("".join(merge) for merge in MERGES)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def make_model_dir(directory: Path, **files: object) -> Path:
    """A complete text side of a model; `generation_config={...}` and the like replace JSON files."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    contents: dict[str, object] = {
        "tokenizer_config": {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}},
        "config": {"max_position_embeddings": 512},
        **files,
    }
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def logprob_of(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -float(token_id), 1)


@dataclass
class Job:
    """One request at the fake decode worker."""

    key: RequestKey
    params: SamplingParams
    index: int
    until_index: int


@dataclass
class FakeWorkers:
    """One prefill and one decode worker. `script` gives the token of (prompt, params, index); `eos` ends a request."""

    script: Callable[[Sequence[int], SamplingParams, int], int]
    eos: int | None = None
    step_seconds: float = 0.0
    held: bool = False  # accept prefills and say nothing more
    sent: list[ToWorker] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    prompts: dict[int, Sequence[int]] = field(default_factory=dict)
    inbox: asyncio.Queue[ToWorker] = field(default_factory=asyncio.Queue)

    def send(self, action: ToWorker) -> None:
        self.sent.append(action)
        self.inbox.put_nowait(action)

    @property
    def cancelled(self) -> list[Cancel]:
        return [action.command for action in self.sent if isinstance(action.command, Cancel)]

    def come_up(self, driver: Driver, hello: WorkerHello = HELLO) -> None:
        for role in Role:
            driver.worker_up("fake:1", role, hello)

    async def run(self, driver: Driver) -> None:
        while True:
            while not self.inbox.empty():
                self._command(driver, self.inbox.get_nowait())
            self._step(driver)
            await asyncio.sleep(self.step_seconds)

    def _command(self, driver: Driver, action: ToWorker) -> None:
        match action.command:
            case PrefillStart() as start:
                ticket = Ticket(1, HELLO.node, len(start.token_ids), 1, 60.0)
                driver.worker_event(action.address, Role.PREFILL, PrefillAccepted(start.key, ticket, cached_tokens=3))
                self.prompts[start.key.request] = start.token_ids[: len(start.token_ids) - start.emitted]
                if not self.held:
                    first = self._token(start.key.request, start.params, start.emitted)
                    reason = self._end(first, start.params)
                    prompt_logprobs = [logprob_of(each) for each in start.token_ids]
                    event = FirstToken(
                        start.key,
                        first,
                        reason,
                        first.token_id if reason is FinishReason.STOP else None,
                        prompt_logprobs if start.params.prompt_logprobs is not None else (),
                        StageTimes(0.001, 0.01, 0.0),
                    )
                    driver.worker_event(action.address, Role.PREFILL, event)
            case DecodeStart() as start:
                if not self.held:
                    first = self._token(start.key.request, start.params, start.emitted)
                    driver.worker_event(action.address, Role.DECODE, FirstToken(start.key, first))
                job = Job(start.key, start.params, start.emitted + 1, start.until_index)
                self.jobs[start.key.request] = job
            case Cancel(key):
                self.jobs.pop(key.request, None)
            case Credit(key, until_index):
                if key.request in self.jobs:
                    self.jobs[key.request].until_index = until_index

    def _step(self, driver: Driver) -> None:
        rows, finishes = [], []
        for job in list(self.jobs.values()):
            if self.held or job.index >= job.until_index:
                continue
            token = self._token(job.key.request, job.params, job.index)
            rows.append(Row(job.key, token))
            job.index += 1
            if (reason := self._end(token, job.params)) is not None:
                stop = token.token_id if reason is FinishReason.STOP else None
                finishes.append(Finish(job.key, reason, stop, StageTimes(0.002, 0.05, 0.003)))
                del self.jobs[job.key.request]
        if rows:
            driver.worker_event("fake:1", Role.DECODE, StepBatch(1, rows, finishes))

    def _token(self, request: int, params: SamplingParams, index: int) -> Token:
        token_id = self.script(self.prompts[request], params, index)
        return Token(index, token_id, logprob_of(token_id) if params.logprobs is not None else None)

    def _end(self, token: Token, params: SamplingParams) -> FinishReason | None:
        ends = {*params.stop_token_ids, *(() if self.eos is None else (self.eos,))}
        if token.token_id in ends and token.index >= params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if token.index + 1 == params.max_tokens else None


@dataclass
class Front:
    address: str
    channel: grpc.aio.Channel
    model: TextModel
    driver: Driver
    workers: FakeWorkers
    service: GenerationService
    core: front.Front
    counts: Counts

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text, False)


@contextlib.asynccontextmanager
async def running_front(
    directory: Path,
    script: Callable[[Sequence[int], SamplingParams, int], int],
    *,
    up: bool = True,
    config: RouterConfig | None = None,
    deadlines: front.Deadlines | None = None,
    **workers: object,
) -> AsyncIterator[Front]:
    model = TextModel(("tiny", "tiny-alias"), directory)
    dispatcher = Dispatcher(config or RouterConfig(), random.Random(5), time.monotonic())
    fake = FakeWorkers(script, **workers)  # type: ignore[arg-type]
    driver = Driver(dispatcher, fake.send)
    counts = Counts()
    core = front.Front(lambda: model, driver, counts, deadlines or front.Deadlines())
    service = GenerationService(core)
    server = open_server(Security(), internal=False)
    health = Health(server, [border.SERVICE])
    border.add_to_server(lambda: service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await health.start()
    if up:
        fake.come_up(driver)
    tasks = [asyncio.create_task(driver.run()), asyncio.create_task(fake.run(driver))]
    address = f"127.0.0.1:{port}"
    channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        yield Front(address, channel, model, driver, fake, service, core, counts)
        await _until(lambda: dispatcher.idle)
        dispatcher.audit()
        assert not driver._calls, "a call is still waiting"
    finally:
        await channel.close()
        await server.stop(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        model.close()


async def _until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


until = _until
