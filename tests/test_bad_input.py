"""What a person gets who asks for what cannot be: one sentence with the numbers, the right status, nothing lost.

Everything here goes through real processes. While bad requests are refused a good one runs on, and afterwards every
block is free.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from by_hand import Started, started
from cluster import Cluster
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kill_workers import Stream, all_idle, request_for
from test_pagewire_cli import one_sentence, pagewire

from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc

MODULES = ("router", "prefill_service", "decode_service")
VOCAB = 250
FEW = gpb.StoppingParams(max_tokens=2)


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(cluster.address) as opened:
        yield opened


async def refusal(channel: grpc.aio.Channel, asked: gpb.GenerateRequest) -> tuple[str, str, str]:
    """(status, field, sentence)"""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked, timeout=30)
    status = rpc_status.from_call(caught.value)
    field = ""
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            field = error_details_pb2.BadRequest.FromString(detail.value).field_violations[0].field
    return caught.value.code().name, field, caught.value.details() or ""


def chat(messages: Any) -> gpb.ChatPrompt:
    return gpb.ChatPrompt(messages_json=messages if isinstance(messages, str) else json.dumps(messages))


def sampling(**fields: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling": gpb.SamplingParams(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"text": "hi", "stopping": gpb.StoppingParams(**fields)}


def ids(count: int) -> gpb.TokenIds:
    return gpb.TokenIds(ids=[5] * count)


BAD = "INVALID_ARGUMENT"
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown model": ({"model": "gpt-9", "text": "hi"}, "NOT_FOUND", "model", "this router serves random:tiny"),
    "no prompt": ({}, BAD, "prompt", "set text, token_ids or chat"),
    "empty text": ({"text": ""}, BAD, "text", "the prompt is empty"),
    "no tokens": ({"token_ids": gpb.TokenIds()}, BAD, "token_ids", "the prompt is empty"),
    "no message": ({"chat": chat([])}, BAD, "chat.messages_json", "at least one message"),
    "no json": ({"chat": chat("[{")}, BAD, "chat.messages_json", "is not valid JSON (line 1, column 3)"),
    "deep json": ({"chat": chat("[" * 100_000)}, BAD, "chat.messages_json", "is not valid JSON"),
    "a role": ({"chat": chat([{"role": "boss", "content": "x"}])}, BAD, "chat.messages_json", "'boss'; roles are"),
    "no content": ({"chat": chat([{"role": "user"}])}, BAD, "chat.messages_json", "the content of message 0"),
    "half a character": ({"chat": chat([{"role": "user", "content": "\ud800"}])}, BAD, "chat", "surrogate"),
    "temperature": (sampling(temperature=11), BAD, "sampling.temperature", "must be in [0, 10], got 11"),
    "not a number": (sampling(top_p=float("nan")), BAD, "sampling.top_p", "must be in (0, 1], got nan"),
    "bias": (sampling(logit_bias={5: 500}), BAD, "sampling.logit_bias", "must be in [-100, 100], got 500"),
    "choices": (sampling(n=99), BAD, "sampling.n", "must be in [1, 16], got 99"),
    "max_tokens": (stopping(max_tokens=0), BAD, "stopping.max_tokens", "must be in [1, 2147483647], got 0"),
    "stop strings": (stopping(stop=["x"] * 17), BAD, "stopping.stop", "must have at most 16 entries, got 17"),
    "a token id": ({"token_ids": gpb.TokenIds(ids=[9999])}, BAD, "token_ids", "9999; the model's ids are 0 to 319"),
    "not built": ({"text": "hi", "lora_adapter": "x"}, "UNIMPLEMENTED", "lora_adapter", "LoRA is not built yet"),
    "too much text": ({"text": "a" * 2_000_000}, BAD, "text", "at most 1048576 bytes, got 2000000"),
    "too long": ({"token_ids": ids(9000)}, BAD, "", "has 9000 tokens .* 8192 tokens .* that fits has 8191"),
    "too long an answer": (
        {"token_ids": ids(8000), "stopping": gpb.StoppingParams(max_tokens=500)},
        BAD,
        "",
        "8000 tokens and max_tokens is 500, .* 8192 in all; .* may be 192, .* may have 7692",
    ),
}


async def test_every_bad_request_is_refused_and_a_good_one_beside_them_goes_on(
    channel: grpc.aio.Channel, cluster: Cluster
) -> None:
    good = request_for(3, 40, 300, VOCAB)
    running = Stream(channel, good)
    await running.until_tokens(1)
    for name, (parts, status, field, words) in REFUSED.items():
        got = await refusal(channel, gpb.GenerateRequest(**parts))
        assert got[:2] == (status, field), (name, got)
        pieces = words.split(" .* ")
        assert all(piece in got[2] for piece in pieces) and "\n" not in got[2], (name, got)
    assert await running.whole() == await Stream(channel, good).whole()
    assert await all_idle(cluster) == ""


@pytest.mark.parametrize("raw", [b"\x12\x02\xff\xfe", b"\xff\xff\xff"], ids=["not UTF-8", "no message"])
async def test_bytes_that_are_no_request_are_the_clients_fault(channel: grpc.aio.Channel, raw: bytes) -> None:
    call = channel.unary_unary("/pagewire.v1.GenerationService/Generate", request_serializer=lambda data: data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(raw)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not valid UTF-8" in str(caught.value.details())


# ---- what cannot start --------------------------------------------------------------------------------------------


def test_no_process_starts_with_what_it_cannot_serve_or_where_it_cannot_listen(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    foreign.mkdir()
    (empty / "notes.txt").touch()
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    with socket.create_server(("127.0.0.1", 0)) as holder, ExitStack() as stack:
        taken = str(holder.getsockname()[1])
        cases = {
            ("--model", "nobody", "--port", "0"): "known are smollm2, random:tiny",
            ("--model", str(empty), "--port", "0"): "has no config.json; it holds notes.txt",
            ("--model", str(foreign), "--port", "0"): "BertModel is not supported; supported are Llama",
            ("--model", "random:tiny", "--port", taken): f"port {taken} on 127.0.0.1 is taken by",
            ("--model", "random:tiny", "--host", "0.0.0.0"): "type --insecure",
        }
        for flags, words in cases.items():
            all_three = [stack.enter_context(started(tmp_path, module, *flags)) for module in MODULES]
            for status, last in (one.end() for one in all_three):
                assert status == 2 and words in last and last.startswith("pagewire "), (flags, last)
                assert taken not in flags or f"(pid {os.getpid()})" in last, last


# ---- workers that do not fit, and too many requests ---------------------------------------------------------------


class Odd:
    """A router of its own over the shared workers and three more: a small pool, another block size, another model.

    It takes one request at a time.
    """

    def __init__(self, router: Started, address: str, small: int, blocks: int, foreign: int) -> None:
        self.router = router
        self.address = address
        self.small, self.blocks, self.foreign = (f"127.0.0.1:{port}" for port in (small, blocks, foreign))


@pytest.fixture(scope="module")
def odd(cluster: Cluster, model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Odd]:
    folder = tmp_path_factory.mktemp("odd")
    with ExitStack() as stack:

        def worker(model: str, *flags: str) -> Started:
            shared = ("--model", model, "--cache-dir", str(model_cache), "--port", "0", "--workers-on-host", "3")
            return stack.enter_context(started(folder, "decode_service", *shared, *flags))

        foreign_model = shutil.copytree(next(model_cache.glob("random--tiny*/")), folder / "foreign")
        config = json.loads((foreign_model / "config.json").read_text())
        (foreign_model / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
        workers = [
            worker("random:tiny", "--kv-memory", "1MiB"),
            worker("random:tiny", "--kv-memory", "16MiB", "--block-size", "32"),
            worker(str(foreign_model), "--kv-memory", "16MiB"),
        ]
        ports = [int(one.wait_for("ready at").split(" after")[0].rpartition(":")[2]) for one in workers]
        good = {role: cluster.programs[f"{role}-1"].address for role in ("prefill", "decode")}
        strays = [f"127.0.0.1:{port}" for port in ports[1:]]
        router = stack.enter_context(
            started(
                folder, "router", "--model", "random:tiny", "--cache-dir", str(model_cache), "--port", "0",
                "--prefill", good["prefill"], "--decode", ",".join([*strays, good["decode"], f"127.0.0.1:{ports[0]}"]),
                "--max-concurrent-requests", "1", "--queue", "0",
            )
        )  # fmt: skip
        port = router.wait_for("alive on").split(" after")[0].rpartition(":")[2]
        router.wait_for("router: ready")
        yield Odd(router, f"127.0.0.1:{port}", *ports)


def listed(odd: Odd) -> str:
    """What `ps` says once all five workers are there."""
    for _ in range(100):
        said = pagewire("ps", "--address", odd.address).stdout
        if said.count("\ndecode ") >= 6 and said.count("\nprefill ") == 1:
            break
    return said


def test_a_worker_of_another_model_or_layout_is_named_field_by_field_and_not_used(odd: Odd) -> None:
    said = listed(odd)
    assert f"decode {odd.blocks} has another KV layout than " in said
    assert "block_size is 32, not 16, block_bytes is 65536, not 32768" in said
    assert f"decode {odd.foreign} serves another model than this router: model_digest is " in said
    assert said.count(" not used ") == 2 and said.count(" accepting ") == 3, said
    answer = pagewire("generate", "hello", "--max-tokens", "4", "--address", odd.address)
    assert answer.returncode == 0 and answer.stdout, "the good ones serve"


async def test_a_prompt_for_which_a_pool_is_too_small_is_refused_with_the_largest_that_fits(odd: Odd) -> None:
    await asyncio.to_thread(listed, odd)
    async with grpc.aio.insecure_channel(odd.address) as channel:
        status, _, sentence = await refusal(channel, gpb.GenerateRequest(token_ids=ids(600), stopping=FEW))
    assert status == "INVALID_ARGUMENT"
    assert "the prompt has 600 tokens and max_tokens is 2" in sentence
    assert f"the smallest pool, decode worker {odd.small} with 32 blocks of 16 tokens allows 512 in all" in sentence
    assert sentence.endswith("with this max_tokens the prompt may have 510")


async def test_when_all_are_busy_a_request_is_refused_with_the_numbers_and_the_others_go_on(odd: Odd) -> None:
    good = request_for(5, 20, 300, VOCAB)
    async with grpc.aio.insecure_channel(odd.address) as channel:
        running = Stream(channel, good)
        await running.until_tokens(1)
        status, _, sentence = await refusal(channel, gpb.GenerateRequest(text="hi", stopping=FEW))
        assert status == "RESOURCE_EXHAUSTED"
        assert sentence.startswith("all workers are busy: 1 running and 0 waiting, the most that this router takes")
        assert await running.whole() == await Stream(channel, good).whole()


# ---- no worker ----------------------------------------------------------------------------------------------------


def test_without_a_worker_client_and_operator_are_told_which_one_is_missing(
    cluster: Cluster, model_cache: Path, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    """And an address that leads to a worker of the other kind is said to."""
    port, nobody = free_ports(2)
    wrong = cluster.programs["prefill-1"].address
    flags = ("--model", "random:tiny", "--cache-dir", str(model_cache), "--port", str(port))
    with started(tmp_path, "router", *flags, "--prefill", f"127.0.0.1:{nobody}", "--decode", wrong) as router:
        router.wait_for("alive on")
        refused = pagewire("generate", "hello", "--address", f"127.0.0.1:{port}")
        while "is being prepared" in refused.stderr or "is starting" in refused.stderr:
            refused = pagewire("generate", "hello", "--address", f"127.0.0.1:{port}")
        assert refused.returncode == 1 and "no prefill worker is up" in one_sentence(refused)
        # A first try may break before its refusal is read; the router tries again and says what it learned then.
        line = router.wait_for(f"{wrong} (it is no decode worker)")
        assert "not ready: no prefill worker is up; no decode worker is up" in line
        assert f"127.0.0.1:{nobody} (nothing listens there)" in line
