"""A prefill and a decode process with a real engine on random:tiny: what a router gets from them, token by token."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from decode_service.config import ROLE as DECODE
from engine.messages import Cancel, DecodeStart, FirstToken, PrefillAccepted, PrefillStart, RequestKey, StepBatch
from engine.types import FinishReason, SamplingParams
from prefill_service.config import ROLE as PREFILL
from tests.test_decode_service_servicer import Link, until
from wire.channel import open_channel
from wire.options import Role
from wire.security import Security

PROMPT = list(range(3, 103))
PARAMS = SamplingParams(temperature=0, seed=1, max_tokens=12, ignore_eos=True)


def start(role: Role, port: int, *argv: str) -> subprocess.Popen[str]:
    ports = ("--port", str(port), "--http-port", "0")
    command = [sys.executable, "-m", f"{role.name}_service", *ports, "--threads", "1", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "ready at" in line:
            return
    pytest.fail(f"not ready: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """A running prefill and a running decode worker; both must end with 0 on SIGTERM."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        chosen = one.getsockname()[1], two.getsockname()[1]
    sizes = ("--model", "random:tiny", "--kv-memory", "16MiB", "--max-num-batched-tokens", "32")
    processes = [start(role, port, *sizes) for role, port in zip((PREFILL, DECODE), chosen, strict=True)]
    try:
        for process in processes:
            wait_ready(process)
        yield chosen
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            out, err = process.communicate(timeout=20)
            assert process.returncode == 0 and "Traceback" not in out + err, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def test_a_prompt_gets_its_ticket_and_every_token_that_a_fresh_prefill_would_give(ports: tuple[int, int]) -> None:
    """Token k of the decode worker, on KV that it pulled, is token 0 of a prefill over the prompt and k tokens."""
    channels = [open_channel(f"127.0.0.1:{port}", Security(), internal=True) for port in ports]
    p, d = Link(PREFILL, channels[0]), Link(DECODE, channels[1])
    p.outbound.put(PrefillStart(RequestKey(1, 1), PROMPT, 0, PARAMS, 60.0, 0.0))
    await until(lambda: bool(p.of(PrefillAccepted, 1)))
    ticket = p.of(PrefillAccepted, 1)[0].ticket
    d.outbound.put(DecodeStart(RequestKey(1, 1, 1), ticket, PROMPT, 0, PARAMS, 60.0, 0.0, 100))

    def steps() -> list[StepBatch]:
        return [event for event in d.events if isinstance(event, StepBatch)]

    await until(lambda: any(step.finishes for step in steps()), 30)
    assert steps()[-1].finishes[0].reason is FinishReason.LENGTH
    tokens = [p.of(FirstToken, 1)[0].token.token_id] + [row.token.token_id for step in steps() for row in step.rows]
    assert len(tokens) == PARAMS.max_tokens and len(set(tokens)) > 2
    for k in range(1, len(tokens)):
        resumed = [*PROMPT, *tokens[:k]]
        p.outbound.put(PrefillStart(RequestKey(100 + k, 1), resumed, k, PARAMS, 60.0, 0.0))
        await until(lambda k=k: bool(p.of(FirstToken, 100 + k)))  # type: ignore[misc]
        token = p.of(FirstToken, 100 + k)[0].token
        assert (token.index, token.token_id) == (k, tokens[k])
        p.outbound.put(Cancel(RequestKey(100 + k, 1)))
    assert p.of(PrefillAccepted, 101)[0].cached_tokens == 96
    await p.end()
    await d.end()
    for channel in channels:
        await channel.close()


def test_an_unknown_model_is_refused_with_what_is_known(free_port: int) -> None:
    process = start(PREFILL, free_port, "--model", "no-such-model")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1
    assert "no-such-model" in err and "smollm2" in err and "random:tiny" in err
