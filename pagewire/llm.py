"""LLM: batches of prompts through an engine in this process, with vLLM's names.

    llm = LLM("smollm2")
    for output in llm.generate(["Once upon a time", "The sky is"], SamplingParams(temperature=0.8, top_p=0.95)):
        print(output.outputs[0].text)

Both stages run over one pool of KV blocks; nothing listens on any port. Calls block, from a running event loop too
(a notebook's). Whatever goes wrong is a PagewireError with one sentence.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.types import SamplingParams
from pagewire.answers import PagewireError
from pagewire.engine_args import EngineArgs, in_python
from pagewire.engine_thread import EngineThread, Job
from pagewire.outputs import RequestOutput
from pagewire.prompts import Messages, PromptLike, check_params, listed, read_chat, read_prompt
from router.text.model import Prompt
from wire.options import ON_CPU

_AHEAD = 2  # jobs that the engine has, for each sequence that it can run


def start(args: EngineArgs) -> EngineThread:
    """Shows on a terminal what it is doing, and what it serves; elsewhere it says only why it takes no card."""
    console = Console(stderr=True, highlight=False)

    def said(phase: str) -> None:
        status.update(phase)
        if phase.startswith(ON_CPU):
            console.print(in_python(phase), markup=False, soft_wrap=True)

    with console.status(f"loading {args.options.model}") as status:
        thread = EngineThread(args, said)
    if console.is_terminal:
        console.print(thread.description, markup=False, soft_wrap=True)
    return thread


class LLM:
    """`arguments` are EngineArgs'. Close it, or use it as a context manager, to give its memory back."""

    def __init__(self, model: str | os.PathLike[str], **arguments: Any) -> None:
        args = EngineArgs(model, **arguments)
        self._thread = start(args)
        self._close = weakref.finalize(self, self._thread.close)
        self._rng = random.Random(args.seed)
        self._numbers = itertools.count()
        self._at_once = _AHEAD * args.options.max_num_seqs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    def close(self) -> None:
        self._close()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own, from its generation_config.json."""
        return SamplingParams(**self._thread.text.defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order. A prompt is a text, {"prompt": text}, {"prompt_token_ids": ids}
        or token ids. Without parameters the model's own apply. `use_tqdm` shows a progress bar.
        """
        text = self._thread.text
        return self._run([read_prompt(each, text) for each in listed(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation or a list of them, through the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if one else messages
        arguments = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        return self._run([read_chat(chat, self._thread.text, arguments) for chat in chats], sampling_params, use_tqdm)

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, show: bool
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if params is None else params
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise PagewireError(
                "INVALID_ARGUMENT",
                f"there are {len(prompts)} prompts and {len(each)} sampling_params",
                "sampling_params",
            )
        done: queue.SimpleQueue[tuple[int, RequestOutput | PagewireError]] = queue.SimpleQueue()
        jobs = [self._job(place, *both, done) for place, both in enumerate(zip(prompts, each, strict=True))]
        outputs: list[RequestOutput | None] = [None] * len(jobs)
        waiting = iter(jobs)
        try:
            for job in itertools.islice(waiting, self._at_once):
                self._thread.submit(job)
            with _progress(len(jobs), show) as advance:
                for _ in jobs:
                    place, output = done.get()
                    if isinstance(output, PagewireError):
                        raise output
                    outputs[place] = output
                    for job in itertools.islice(waiting, 1):
                        self._thread.submit(job)
                    advance(output)
        finally:
            for job, ended in zip(jobs, outputs, strict=True):
                if ended is None:
                    self._thread.abort(job)
        return [output for output in outputs if output is not None]

    def _job(self, place: int, prompt: Prompt, params: SamplingParams, done: queue.SimpleQueue[Any]) -> Job:
        text = self._thread.text
        check_params(params, text)
        seed = self._rng.getrandbits(64) if params.seed is None else params.seed
        number = str(next(self._numbers))
        return Job(number, prompt, params, seed, text.tokenizer, lambda output: done.put((place, output)))


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    """Gives a function to call with each output that is complete."""
    columns = (
        TextColumn("Processed prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        bar = progress.add_task("", total=total, tokens=0)
        tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
            progress.update(bar, advance=1, tokens=tokens)

        yield advance
