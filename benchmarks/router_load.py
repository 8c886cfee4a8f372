"""Many streams at a router's door, read as cheaply as Python can: `python -m benchmarks.router_load grpc ADDRESS ...`.

A process of its own, so that its work is not counted as the router's. It notes when bytes came and looks into them only
after the last stream has ended. Every word that the fake workers say is a space and letters, so tokens are counted by
their spaces. Writes what came of each stream, and when, to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from protos import generation_pb2 as gpb
from wire.channel import open_channel
from wire.security import Security

PROMPT_TOKENS = 64
METHOD = "/pagewire.v1.GenerationService/GenerateStream"


@dataclass(slots=True)
class Taken:
    """What one stream got. `news` are the moments and the bytes."""

    began: float
    news: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    refused: str = ""


def prompt_of(stream: int, every: int) -> list[int]:
    """The fake workers know a stream by its first token, and its pace by the second: a token in so many steps."""
    return [stream, every, *range(PROMPT_TOKENS - 2)]


# ---- gRPC -------------------------------------------------------------------------------------------------------


def grpc_request(stream: int, tokens: int, every: int = 1) -> bytes:
    request = gpb.GenerateRequest(
        token_ids=gpb.TokenIds(ids=prompt_of(stream, every)),
        stopping=gpb.StoppingParams(max_tokens=tokens),
        output=gpb.OutputOptions(return_text=True),
    )
    return gpb.GenerateStreamRequest(request=request).SerializeToString()


def open_method(address: str) -> tuple[grpc.aio.Channel, Any]:
    channel = open_channel(address, Security(), internal=False)
    return channel, channel.unary_stream(METHOD, request_serializer=None, response_deserializer=None)


async def over_grpc(method: Any, stream: int, tokens: int, every: int = 1) -> Taken:
    taken = Taken(time.monotonic())
    call = method(grpc_request(stream, tokens, every))
    try:
        while (data := await call.read()) is not grpc.aio.EOF:
            taken.news.append((time.monotonic(), data))
    except grpc.aio.AioRpcError as error:
        taken.refused = error.code().name
    taken.ended = time.monotonic()
    return taken


def words_in_message(data: bytes) -> int:
    return gpb.GenerateStreamResponse.FromString(data).delta.text.count(" ")


# ---- HTTP -------------------------------------------------------------------------------------------------------


def http_request(stream: int, tokens: int, every: int = 1) -> bytes:
    asked = {"prompt": prompt_of(stream, every), "max_tokens": tokens, "stream": True}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Reader(asyncio.Protocol):
    """One connection; `request` sends on it and waits for the answer's last event, or a refusal's body."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._taken: Taken | None = None
        self._over: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._taken is None or self._over is None:
            return
        self._taken.news.append((time.monotonic(), data))
        if b"[DONE]" in data or not self._taken.news[0][1].startswith(b"HTTP/1.1 200"):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def request(self, data: bytes) -> Taken:
        self._taken = Taken(time.monotonic())
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        await self._over
        taken, self._taken = self._taken, None
        taken.ended = time.monotonic()
        first = taken.news[0][1] if taken.news else b""
        if not first.startswith(b"HTTP/1.1 200"):
            taken.refused = first[9:12].decode() or "closed"
        return taken

    def close(self) -> None:
        self._transport.close()


async def connect(address: str) -> Reader:
    host, _, port = address.rpartition(":")
    _, reader = await asyncio.get_running_loop().create_connection(Reader, host, int(port))
    return reader


async def over_http(address: str, stream: int, tokens: int, every: int = 1) -> Taken:
    reader = await connect(address)
    taken = await reader.request(http_request(stream, tokens, every))
    reader.close()
    return taken


def words_in_events(data: bytes) -> int:
    """An answer's head has spaces too, and every event has the one behind "data:"."""
    body = data.partition(b"\r\n\r\n")[2] if data.startswith(b"HTTP/1.1") else data
    return body.count(b" ") - body.count(b"data: ")


# ---- both -------------------------------------------------------------------------------------------------------


async def run(arguments: argparse.Namespace) -> None:
    streams = range(arguments.first, arguments.first + arguments.streams)
    opened = [open_method(arguments.address) for _ in range(arguments.connections if arguments.door == "grpc" else 0)]

    async def one(number: int) -> Taken:
        await asyncio.sleep(arguments.ramp * number / len(streams))
        stream = streams[number]
        if opened:
            return await over_grpc(opened[number % len(opened)][1], stream, arguments.tokens, arguments.every)
        return await over_http(arguments.address, stream, arguments.tokens, arguments.every)

    gc.disable()  # it keeps everything that came
    everything = await asyncio.gather(*map(one, range(len(streams))))
    count = words_in_message if arguments.door == "grpc" else words_in_events
    answer = {
        stream: {
            "began": taken.began,
            "ended": taken.ended,
            "refused": taken.refused,
            "news": [(at, words) for at, data in taken.news if (words := count(data))],
        }
        for stream, taken in zip(streams, everything, strict=True)
    }
    arguments.out.write_text(json.dumps({"cpu": time.process_time(), "streams": answer}))
    for channel, _ in opened:
        await channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("door", choices=("grpc", "http"))
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=250)
    parser.add_argument("--first", type=int, default=0, help="the number of the first stream")
    parser.add_argument("--tokens", type=int, default=320, help="of each stream")
    parser.add_argument("--every", type=int, default=1, help="worker's steps to a token of one stream")
    parser.add_argument("--ramp", type=float, default=1.0, help="seconds over which the streams begin")
    parser.add_argument("--connections", type=int, default=4, help="that gRPC's streams share")
    parser.add_argument("--out", type=Path, required=True)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
