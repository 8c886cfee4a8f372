"""The thread that owns an engine in this process: it loads the model, takes jobs and runs steps while there are any.

Other threads give it jobs and take them back; it answers by each job's `deliver`, on its own thread. Nobody else
touches the engine or the device. It never waits for whoever listens.
"""

from __future__ import annotations

import dataclasses
import gc
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.types import FinishReason, InvalidField, SamplingParams, Token, TokenLogprob
from pagewire.answers import PagewireError
from pagewire.engine_args import EngineArgs, in_python
from pagewire.local_engine import Begun, LocalEngine
from pagewire.outputs import CompletionOutput, RequestMetrics, RequestOutput, by_token
from router.actions import Outcome, Times
from router.answer import Answer
from router.text.chat import BadTemplate
from router.text.model import Prompt, TextModel
from router.text.tokenizer import NoTokenizer, Tokenizer
from router.validate import OutputOptions, choice_seed
from wire.worker import CannotStart

Deliver = Callable[[RequestOutput | PagewireError], None]
Say = Callable[[str], None]

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


class Job:
    """A prompt with all its choices. `stream`: an output after each step, not only the last one.

    Made by anybody; from submit() on it is the engine thread's.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        tokenizer: Tokenizer,
        deliver: Deliver,
        *,
        stream: bool = False,
    ) -> None:
        self.params = params
        self.deliver = deliver
        self.stream = stream
        self.numbers: list[int] = []  # the engine's, by choice
        self.prompt_ids = list(prompt.token_ids)
        self._request_id = request_id
        self._text = prompt.text
        self._seed = seed
        self._decode = lambda ids: tokenizer.decode(ids, keep_special_tokens=True)
        shown = OutputOptions(keep_special_tokens=not params.skip_special_tokens)
        self._answers = [Answer(tokenizer, self.prompt_ids, params, shown) for _ in range(params.n)]
        self._choices = [CompletionOutput(index) for index in range(params.n)]
        self._prompt_logprobs: list[Any] | None = None
        self._metrics = RequestMetrics(time.time())
        self._cached_tokens: int | None = None
        if params.logprobs is not None:
            for choice in self._choices:
                choice.logprobs, choice.cumulative_logprob = [], 0.0

    def parts(self) -> list[SamplingParams]:
        """One request of the engine for each choice; prompt logprobs come with the first."""
        return [
            dataclasses.replace(
                self.params,
                n=1,
                seed=choice_seed(self._seed, index),
                prompt_logprobs=self.params.prompt_logprobs if index == 0 else None,
            )
            for index in range(self.params.n)
        ]

    @property
    def over(self) -> bool:
        return all(answer.ended for answer in self._answers)

    def ended(self, index: int) -> bool:
        return self._answers[index].ended

    def begin(self, begun: Begun) -> None:
        """A choice has its first token; what the first of them tells is told of the request."""
        if self._cached_tokens is None:
            self._cached_tokens = begun.cached_tokens
            scheduled = self._metrics.arrival_time + begun.queued
            self._metrics = dataclasses.replace(
                self._metrics, first_scheduled_time=scheduled, time_in_queue=begun.queued
            )

    def accept(self, index: int, token: Token, reason: FinishReason | None, stop_token_id: int | None) -> None:
        answer = self._answers[index]
        now = time.time()
        first = self._metrics.first_token_time or now
        self._metrics = dataclasses.replace(self._metrics, first_token_time=first, last_token_time=now)
        answer.extend([token], None if reason is None else _outcome(reason, stop_token_id))
        if answer.stopped is not None and not answer.ended:
            answer.extend((), _outcome(FinishReason.STOP))
        self._take(index)

    def end(self, reason: FinishReason) -> None:
        """Of every choice that has not ended."""
        for index, answer in enumerate(self._answers):
            if not answer.ended:
                answer.extend((), _outcome(reason))
                self._take(index)

    def take_prompt_logprobs(self, reports: Sequence[TokenLogprob]) -> None:
        self._prompt_logprobs = [by_token(each, self._decode) or None for each in reports]

    def output(self) -> RequestOutput:
        """A copy of all there is."""
        over = self.over
        return RequestOutput(
            self._request_id,
            self._text,
            list(self.prompt_ids),
            [
                dataclasses.replace(
                    each,
                    token_ids=list(each.token_ids),
                    logprobs=None if each.logprobs is None else list(each.logprobs),
                )
                for each in self._choices
            ],
            over,
            self._prompt_logprobs,
            dataclasses.replace(self._metrics, finished_time=time.time() if over else None),
            self._cached_tokens,
        )

    def _take(self, index: int) -> None:
        piece, choice = self._answers[index].take(), self._choices[index]
        choice.text += piece.text
        choice.token_ids += piece.tokens
        if choice.logprobs is not None:
            choice.logprobs += [by_token(each, self._decode) for each in piece.logprobs]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(
                each.logprob or 0.0 for each in piece.logprobs
            )
        if piece.finish_reason is not None:
            choice.finish_reason = _REASONS[piece.finish_reason]
            choice.stop_reason = piece.stop_text if piece.stop_text is not None else piece.stop_token_id


def _outcome(reason: FinishReason, stop_token_id: int | None = None) -> Outcome:
    return Outcome(reason, 0, 0, 0, Times(), stop_token_id)  # an Answer looks at these two alone


class EngineThread:
    """Blocks until the model is loaded. Raises PagewireError, one sentence, if it cannot be. `say` hears the phases."""

    text: TextModel
    engine: LocalEngine
    description: str  # what is served, and how much of it at once

    def __init__(self, args: EngineArgs, say: Say) -> None:
        self._args = args
        self._say = say
        self._inbox: queue.SimpleQueue[tuple[str, Job | None]] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Job, int]] = {}
        self._lock = threading.Lock()  # between a failure and the last jobs that come in
        self._failure: PagewireError | None = None
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._main, name="pagewire-engine", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._failure is not None:
            raise self._failure

    def submit(self, job: Job) -> None:
        """Raises PagewireError if the engine is no more; whatever else is wrong is delivered."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._inbox.put(("add", job))

    def abort(self, job: Job) -> None:
        """It is delivered as it is, finished; does nothing if it is over."""
        self._inbox.put(("abort", job))

    def close(self) -> None:
        """Waits for the step that runs. Whoever still waits for an output gets an error."""
        self._inbox.put(("close", None))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- on the thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._load()
            self._say("ready")
            self._loaded.set()
            self._serve()
            self._fail(PagewireError("CANCELLED", "the engine was closed"))
        except CannotStart as error:
            self._fail(PagewireError("FAILED_PRECONDITION", in_python(str(error))))
        except (NoTokenizer, BadTemplate) as error:
            self._fail(PagewireError("FAILED_PRECONDITION", str(error)))
        except BaseException as error:  # the interpreter prints its traceback
            self._fail(PagewireError("INTERNAL", f"the engine has failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._loaded.set()
            self._unload()

    def _unload(self) -> None:
        """Gives back the memory. What is on a card is taken apart by the thread that made it."""
        if hasattr(self, "engine"):
            del self.engine
        gc.unfreeze()  # frozen when it was started on a card
        gc.collect()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _load(self) -> None:
        from engine.config import ModelError
        from engine.loader import resolve_model
        from kvtransfer.startup import assemble

        args, options = self._args, self._args.options
        try:
            source = resolve_model(options.model, lambda phase, fraction: self._say(phase), options.cache_dir)
        except (ModelError, OSError) as error:
            raise CannotStart(str(error)) from error
        if args.tokenizer is not None and not args.tokenizer.is_dir():
            raise CannotStart(f"tokenizer must be a directory with tokenizer.json, and {args.tokenizer} is none")
        self.text = TextModel([source.name], source.dir, args.tokenizer)
        parts = assemble(options, self._say)
        self.description = parts.description
        self.engine = LocalEngine(parts.runner, parts.config, seed=args.seed)
        self._eos = parts.runner.eos_token_ids

    def _serve(self) -> None:
        while True:
            try:
                while True:
                    command, job = self._inbox.get(block=not self.engine.has_work)
                    if job is None:
                        return
                    if command == "add":
                        self._add(job)
                    else:
                        self._abort(job)
            except queue.Empty:
                self._step()

    def _add(self, job: Job) -> None:
        try:
            for index, params in enumerate(job.parts()):
                number = self.engine.add_request(job.prompt_ids, params)
                job.numbers.append(number)
                self._owners[number] = (job, index)
        except ValueError as error:
            self._let_go(job)
            field = error.field if isinstance(error, InvalidField) else "prompt"
            job.deliver(PagewireError("INVALID_ARGUMENT", str(error), field))

    def _abort(self, job: Job) -> None:
        if self._let_go(job):
            job.end(FinishReason.CANCELLED)
            job.deliver(job.output())

    def _let_go(self, job: Job) -> bool:
        """Whether any choice was still running."""
        running = [number for number in job.numbers if self._owners.pop(number, None) is not None]
        for number in running:
            self.engine.cancel(number)
            self.engine.prompt_logprobs.pop(number, None)
            self.engine.begun.pop(number, None)
        return bool(running)

    def _step(self) -> None:
        from engine.stopping import finish_of

        touched: dict[Job, None] = {}
        for number, token, reason in self.engine.step():
            if (owner := self._owners.get(number)) is None:
                continue  # it ended in the same step, or was taken back
            job, index = owner
            if begun := self.engine.begun.pop(number, None):
                job.begin(begun)
            if reports := self.engine.prompt_logprobs.pop(number, None):
                job.take_prompt_logprobs(reports)
            stop_token_id = finish_of(token.token_id, token.index, job.params, self._eos)[1] if reason else None
            job.accept(index, token, reason, stop_token_id)
            if job.ended(index):
                del self._owners[number]
                self.engine.cancel(number)  # a stop string ends it here; the engine does not know
            touched[job] = None
        for job in touched:
            if job.stream or job.over:
                job.deliver(job.output())

    def _fail(self, failure: PagewireError) -> None:
        with self._lock:
            self._failure = failure
        jobs = {job for job, _ in self._owners.values()}
        while not self._inbox.empty():
            command, job = self._inbox.get()
            if command == "add" and job is not None:
                jobs.add(job)
        for job in jobs:
            job.deliver(failure)
