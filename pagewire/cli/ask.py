"""`pagewire generate` and `pagewire chat`: prompts to a router, text to the terminal as it is made.

Blocking on purpose: one request at a time, and Ctrl-C cancels it. Only text goes to stdout, so that it can be piped.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from engine.types import FinishReason, SamplingParams
from pagewire.answers import PagewireError
from pagewire.cli.failure import CommandFailed
from pagewire.client import Client
from pagewire.codec import Prompt
from wire.security import Security

CHAT_HELP = """\
/help   this list
/reset  forget the conversation
/exit   leave; so does Ctrl-D
Ctrl-C stops an answer. Anything else is sent to the model."""


@dataclass(slots=True)
class Spoken:
    """What came of one streamed answer."""

    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    tokens: int
    first_token: float  # seconds from the call to the first token
    per_second: float  # tokens after the first one

    def summary(self) -> str:
        end = f", ended by {self.finish_reason.name.lower()}" if self.finish_reason else ""
        return (
            f"{self.prompt_tokens} prompt tokens, {self.tokens} tokens{end}; "
            f"first token after {self.first_token:.2f} s, then {self.per_second:.1f} tokens/s"
        )


def speak(client: Client, prompt: Prompt, sampling: SamplingParams) -> Spoken:
    """Writes the answer to stdout as it comes; a newline ends it. Ctrl-C ends it early and returns what was said."""
    parts: list[str] = []
    reason: FinishReason | None = None
    tokens = 0
    began = time.monotonic()
    first = last = began
    with client.stream(prompt, sampling) as stream:
        try:
            for delta in stream:
                last = time.monotonic()
                first = last if tokens == 0 else first
                tokens += len(delta.token_ids)
                reason = delta.finish_reason or reason
                parts.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            reason = FinishReason.CANCELLED
        finally:
            if parts and not parts[-1].endswith("\n"):
                print(flush=True)
        used = stream.usage.prompt_tokens or stream.started.prompt_tokens
    speed = (tokens - 1) / (last - first) if last > first else 0.0
    return Spoken("".join(parts), reason, used, tokens, first - began, speed)


def generate(address: str, security: Security, text: str, sampling: SamplingParams, *, raw: bool, stats: bool) -> None:
    if not text.strip():
        raise CommandFailed("the prompt is empty: give it as an argument or on standard input", exit_code=2)
    with Client(address, security) as client:
        spoken = speak(client, text if raw else [{"role": "user", "content": text}], sampling)
    if stats:
        print(spoken.summary(), file=sys.stderr)
    if spoken.finish_reason is FinishReason.CANCELLED:
        raise CommandFailed("interrupted", exit_code=130)


def chat(address: str, security: Security, system: str | None, sampling: SamplingParams) -> None:
    beginning = [{"role": "system", "content": system}] if system else []
    with Client(address, security) as client:
        models = client.models(timeout=10)
        _hint(f"{models[0].id if models else 'a model'} at {address}; /help lists what can be typed")
        messages = list(beginning)
        while (line := _read_line()) is not None:
            if line in ("/exit", "/quit", "/bye"):
                return
            if line == "/reset":
                messages = list(beginning)
                _hint("the conversation is forgotten")
            elif line.startswith("/"):
                _hint(CHAT_HELP if line in ("/help", "/?") else f"{line} is no command; /help lists them")
            elif line:
                _turn(client, messages, line, sampling)


def _turn(client: Client, messages: list[dict[str, str]], line: str, sampling: SamplingParams) -> None:
    """Adds the question and its answer to the conversation, or neither when it failed."""
    question = {"role": "user", "content": line}
    try:
        spoken = speak(client, [*messages, question], sampling)
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return
    messages += [question, {"role": "assistant", "content": spoken.text}]


def _read_line() -> str | None:
    """One line, or None at the end. The prompt is only for a person."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        _hint("")
        return None


def _hint(text: str) -> None:
    if sys.stdin.isatty():
        print(text)
