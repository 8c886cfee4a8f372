"""The Python clients: answers as plain values, every failure as one sentence, and the wrong port explained."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from router_front import Front, make_model_dir, make_tokenizer, running_front, until

import pagewire
from engine.types import FinishReason, SamplingParams
from pagewire.client import AsyncClient, Client, PagewireError, build_request
from wire.channel import open_server
from wire.health import Health
from wire.security import Security

ENCODED = make_tokenizer()
IDS = ENCODED.encode("one two ✓ ").ids


def script(prompt: Sequence[int], params: SamplingParams, index: int) -> int:
    return IDS[index % len(IDS)]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(make_model_dir(tmp_path), script) as running:
        yield running


async def test_an_answer_has_text_tokens_reason_usage_and_timing(front: Front) -> None:
    async with AsyncClient(front.address) as client:
        result = await client.generate("hello", SamplingParams(temperature=0, max_tokens=4), request_id="a")
    assert result.text == ENCODED.decode(IDS[:4]) and list(result.token_ids) == IDS[:4]
    assert result.finish_reason is FinishReason.LENGTH and result.request_id == "a"
    assert result.usage.prompt_tokens == 1 and result.usage.completion_tokens == 4
    assert result.timing.decode > 0


async def test_text_ids_and_chats_are_prompts(front: Front) -> None:
    params = SamplingParams(max_tokens=1)
    async with AsyncClient(front.address) as client:
        assert (await client.generate([1, 2, 3], params)).usage.prompt_tokens == 3
        chat = await client.generate([{"role": "user", "content": "hé"}], params)
        tokens = await client.tokenize([{"role": "user", "content": "hé"}])
        assert chat.usage.prompt_tokens == len(tokens)
        assert await client.detokenize(await client.tokenize("hello ✓")) == "hello ✓"


async def test_special_tokens_are_shown_to_who_asks_for_them() -> None:
    for params, kept in ((SamplingParams(), False), (SamplingParams(skip_special_tokens=False), True)):
        assert build_request("x", params).output.keep_special_tokens is kept


async def test_a_stream_gives_deltas_and_then_usage(front: Front) -> None:
    async with AsyncClient(front.address) as client, client.stream("x", SamplingParams(max_tokens=20, n=2)) as stream:
        texts = {0: "", 1: ""}
        async for delta in stream:
            texts[delta.index] += delta.text
            assert stream.started.prompt_tokens == 1 and stream.started.seed > 0
    assert texts[0] == texts[1] == ENCODED.decode([IDS[index % len(IDS)] for index in range(20)])
    assert stream.usage.completion_tokens == 40 and stream.timing.time_to_first_token > 0


async def test_leaving_a_stream_cancels_the_request(front: Front) -> None:
    front.workers.step_seconds = 0.01
    async with AsyncClient(front.address) as client:
        async with client.stream("x", SamplingParams(max_tokens=400)) as stream:
            async for _ in stream:
                break
        await until(lambda: front.driver.dispatcher.idle, 0.5)


async def test_models_and_workers_are_plain_values(front: Front) -> None:
    async with AsyncClient(front.address) as client:
        models = await client.models()
        assert [(model.id, model.root, model.max_model_len) for model in models][0] == ("tiny", "tiny", 512)
        info = await client.server_info()
        assert info.version == pagewire.__version__ and info.prefill_workers == 1
        assert {worker.role for worker in info.workers} == {"prefill", "decode"}


async def test_the_blocking_client_does_the_same(front: Front) -> None:
    def use() -> None:
        with Client(front.address) as client:
            params = SamplingParams(max_tokens=20)
            whole = client.generate("hello", params)
            with client.stream("hello", params) as stream:
                assert "".join(delta.text for delta in stream) == whole.text
            assert stream.usage == whole.usage
            assert client.models()[0].id == "tiny" and client.server_info().decode_workers == 1
            assert client.detokenize(client.tokenize("abc")) == "abc"
            with pytest.raises(PagewireError) as caught:
                client.generate("")
            assert caught.value.code == "INVALID_ARGUMENT" and caught.value.field == "text"

    await asyncio.to_thread(use)


async def test_an_error_has_code_sentence_field_and_numbers(front: Front) -> None:
    async with AsyncClient(front.address) as client:
        with pytest.raises(PagewireError) as caught:
            await client.generate("x" * 600, SamplingParams(max_tokens=1))
        assert caught.value.code == "INVALID_ARGUMENT" and caught.value.facts["prompt_tokens"] == "600"
        with pytest.raises(PagewireError) as caught:
            await client.generate([70000])
        assert caught.value.field == "token_ids" and "\n" not in str(caught.value)
        for wrong in ([-1], "\ud800", ["a"], None):
            with pytest.raises(PagewireError, match="cannot be built"):
                await client.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(PagewireError, match=r"the message has 50000\d\d bytes, .* at most 4194304"):
            await client.generate("a" * 5_000_000)


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda client: client.generate(5), "one text, token ids or chat messages, got int$"),
        (lambda client: client.generate(["a", "b"]), "one text, token ids or chat messages, got list of str$"),
        (lambda client: client.generate("x", {"max_tokens": 3}), "params must be SamplingParams, got dict$"),
        (lambda client: client.tokenize(5), "a text or chat messages become tokens, got int$"),
        (lambda client: client.tokenize("\ud800"), "cannot be built: .* surrogates not allowed$"),
        (lambda client: client.tokenize([{"role": object()}]), "cannot be built: Object of type object is not JSON"),
        (lambda client: client.detokenize("abc"), "got str$"),
        (lambda client: client.detokenize([-1]), "cannot be built: Value out of range: -1$"),
    ],
)
async def test_what_is_no_request_is_a_sentence(front: Front, use: Any, sentence: str) -> None:
    def blocking() -> None:
        with Client(front.address) as client, pytest.raises(PagewireError, match=sentence):
            use(client)

    await asyncio.to_thread(blocking)
    async with AsyncClient(front.address) as client:
        with pytest.raises(PagewireError, match=sentence):
            await use(client)


async def test_a_closed_client_says_so(front: Front) -> None:
    closed = AsyncClient(front.address)
    await closed.close()
    with pytest.raises(PagewireError, match="the client was closed"):
        await closed.generate("x")
    with pytest.raises(PagewireError, match="the client was closed"):
        _ = [delta async for delta in closed.stream("x")]

    def blocking() -> None:
        client = Client(front.address)
        client.close()
        for use in (client.generate, client.stream):
            with pytest.raises(PagewireError, match="the client was closed"):
                use("x")

    await asyncio.to_thread(blocking)


async def test_an_address_is_no_url() -> None:
    async with AsyncClient("http://127.0.0.1:50051") as client:
        with pytest.raises(PagewireError, match="is no address: give host:port alone"):
            await client.generate("x", timeout=5)


async def test_a_deadline_is_a_sentence(front: Front) -> None:
    front.workers.held = True
    async with AsyncClient(front.address) as client:
        with pytest.raises(PagewireError, match="deadline") as caught:
            await client.generate("x", timeout=0.2)
        assert caught.value.code == "DEADLINE_EXCEEDED"
        with pytest.raises(PagewireError, match="deadline"):
            async for _ in client.stream("x", timeout=0.2):
                pass


# ---- the wrong port -----------------------------------------------------------------------------------------------


async def sentence_at(address: str) -> PagewireError:
    """What both clients say there; they agree."""

    def blocking() -> PagewireError:
        with Client(address) as client, pytest.raises(PagewireError) as caught:
            client.generate("x", timeout=5)
        return caught.value

    async with AsyncClient(address) as client:
        with pytest.raises(PagewireError) as caught:
            await client.generate("x", timeout=5)
    assert str(caught.value) == str(await asyncio.to_thread(blocking))
    return caught.value


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_says_that_it_is_no_router(role: str) -> None:
    server = open_server(Security(), internal=True)
    health = Health(server, [f"pagewire.v1.{role.capitalize()}Service"])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await health.start()
    try:
        error = await sentence_at(f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
    assert error.code == "UNIMPLEMENTED"
    assert str(error).startswith(f"127.0.0.1:{port} is a {role} worker; the router listens on 127.0.0.1:50051")


async def test_another_grpc_server_is_no_router() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert "is a gRPC server, but not a Pagewire router" in str(await sentence_at(f"127.0.0.1:{port}"))
    finally:
        await server.stop(0)


async def test_a_closed_port_says_that_nothing_answers(free_port: int) -> None:
    error = await sentence_at(f"127.0.0.1:{free_port}")
    assert error.code == "UNAVAILABLE" and str(error).startswith(f"nothing answers at 127.0.0.1:{free_port}")


async def test_an_http_port_says_that_it_speaks_http() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n")
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        error = await sentence_at(f"127.0.0.1:{port}")
    finally:
        server.close()
        await server.wait_closed()
    assert f"127.0.0.1:{port} speaks HTTP, not gRPC" in str(error) and "50051" in str(error)


async def test_a_router_that_goes_away_in_mid_stream_is_told_apart_from_a_wrong_address(tmp_path: Path) -> None:
    async with running_front(make_model_dir(tmp_path), script, step_seconds=0.01) as front:
        proxy = await asyncio.start_server(lambda r, w: _forward(r, w, front.address), "127.0.0.1", 0)
        address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(PagewireError, match="connection to the router .* was lost") as caught:
                async for _ in client.stream("x", SamplingParams(max_tokens=400)):
                    for writer in _FORWARDING:
                        writer.transport.abort()
        assert caught.value.code == "UNAVAILABLE"
        proxy.close()
        await until(lambda: front.driver.dispatcher.idle)


_FORWARDING: list[asyncio.StreamWriter] = []


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
    host, port = address.split(":")
    far_reader, far_writer = await asyncio.open_connection(host, int(port))
    _FORWARDING[:] = [writer, far_writer]

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))


def test_importing_pagewire_is_light_and_names_what_it_has() -> None:
    code = (
        "import sys, pagewire; assert not {'grpc', 'torch', 'google'} & set(sys.modules); "
        "assert set(pagewire.__all__) <= set(dir(pagewire)); pagewire.Client; pagewire.SamplingParams; "
        "assert pagewire.__version__; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
    assert time.monotonic() - began < 10
    with pytest.raises(AttributeError):
        _ = pagewire.Nothing
