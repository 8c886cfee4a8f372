"""Client and AsyncClient: prompts to a router over gRPC, and its answers as plain values.

    with Client() as client:
        print(client.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
        for delta in client.stream([{"role": "user", "content": "Hello"}]):
            print(delta.text, end="")

Whatever goes wrong is a PagewireError with one sentence. Without SamplingParams the model's own defaults apply; a
SamplingParams is sent whole. Nothing is retried: the router itself runs a request again when a worker dies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from engine.types import SamplingParams
from pagewire import codec, diagnosis
from pagewire.answers import Delta, Model, PagewireError, Result, ServerInfo, Started, Timing, Usage
from pagewire.codec import Prompt, build_request
from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc
from wire.channel import MAX_MESSAGE_BYTES, open_channel
from wire.codec import from_duration
from wire.security import Security

__all__ = ["AsyncClient", "Client", "Delta", "PagewireError", "Result"]

DEFAULT_ADDRESS = f"127.0.0.1:{diagnosis.ROUTER_PORT}"

PLAIN = Security()
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")  # gRPC's own words


class AsyncClient:
    """Talks to one router. Use it as an async context manager, or close it."""

    def __init__(self, address: str = DEFAULT_ADDRESS, security: Security = PLAIN) -> None:
        self.address = address
        self._channel = open_channel(address, security, internal=False)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._errors = _Errors(address, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout: float | None = None, **options: Any
    ) -> Result:
        """The whole answer. `timeout` is its deadline in seconds; `pagewire.codec.build_request` lists the options."""
        request = build_request(prompt, params, **options)
        return codec.result(await self._unary(self._stub.Generate, request, timeout))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        min_tokens_per_chunk: int = 0,
        **options: Any,
    ) -> AsyncStream:
        """The answer as it is made. Leaving the iteration early cancels the request: see AsyncStream."""
        request = gpb.GenerateStreamRequest(
            request=build_request(prompt, params, **options), min_tokens_per_chunk=min_tokens_per_chunk
        )
        with _open():
            return AsyncStream(self._stub.GenerateStream(request, timeout=timeout), self._errors)

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> list[int]:
        request = codec.tokenize_request(prompt, add_special_tokens)
        return list((await self._unary(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        request = codec.detokenize_request(token_ids)
        return str((await self._unary(self._stub.Detokenize, request, timeout)).text)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        return codec.models(await self._unary(self._stub.ListModels, gpb.ListModelsRequest(), timeout))

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return codec.server_info(await self._unary(self._stub.GetServerInfo, gpb.GetServerInfoRequest(), timeout))

    async def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        with _open():
            call = method(request, timeout=timeout)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise await asyncio.to_thread(self._errors.of, error) from None
        finally:
            call.cancel()


class AsyncStream:
    """An async iterator of Delta. `started` is known from the first delta on, `usage` and `timing` after the last.

    `async with` closes it; so does `aclose`, and its end. Closing early cancels the request.
    """

    def __init__(self, call: Any, errors: _Errors) -> None:
        self.started = Started()
        self.usage = Usage()
        self.timing = Timing()
        self._call = call
        self._errors = errors

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if (delta := codec.take(self, response)) is not None:
                    return delta
        except grpc.aio.AioRpcError as error:
            raise await asyncio.to_thread(self._errors.of, error, bool(self.started.request_id)) from None
        except BaseException:
            self._call.cancel()
            raise
        raise StopAsyncIteration

    def __del__(self) -> None:
        self._call.cancel()


class Client:
    """AsyncClient for code without an event loop. Use it as a context manager, or close it."""

    def __init__(self, address: str = DEFAULT_ADDRESS, security: Security = PLAIN) -> None:
        self.address = address
        self._channel = _open_blocking_channel(address, security)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {security.token}"),) if security.token else ()
        self._errors = _Errors(address, security)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout: float | None = None, **options: Any
    ) -> Result:
        """The whole answer. `timeout` is its deadline in seconds; `pagewire.codec.build_request` lists the options."""
        return codec.result(self._unary(self._stub.Generate, build_request(prompt, params, **options), timeout))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        min_tokens_per_chunk: int = 0,
        **options: Any,
    ) -> Stream:
        """The answer as it is made. Leaving the iteration early cancels the request: see Stream."""
        request = gpb.GenerateStreamRequest(
            request=build_request(prompt, params, **options), min_tokens_per_chunk=min_tokens_per_chunk
        )
        with _open():
            call = self._stub.GenerateStream(request, timeout=timeout, metadata=self._metadata)
        return Stream(call, self._errors)

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> list[int]:
        request = codec.tokenize_request(prompt, add_special_tokens)
        return list(self._unary(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        return str(self._unary(self._stub.Detokenize, codec.detokenize_request(token_ids), timeout).text)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        return codec.models(self._unary(self._stub.ListModels, gpb.ListModelsRequest(), timeout))

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return codec.server_info(self._unary(self._stub.GetServerInfo, gpb.GetServerInfoRequest(), timeout))

    def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            with _open():
                return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._errors.of(error) from None


class Stream:
    """An iterator of Delta. `started` is known from the first delta on, `usage` and `timing` after the last.

    `with` closes it; so does `close`, and its end. Closing early cancels the request.
    """

    def __init__(self, call: Any, errors: _Errors) -> None:
        self.started = Started()
        self.usage = Usage()
        self.timing = Timing()
        self._call = call
        self._errors = errors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        try:
            for response in self._call:
                if (delta := codec.take(self, response)) is not None:
                    return delta
        except grpc.RpcError as error:
            raise self._errors.of(error, bool(self.started.request_id)) from None
        except BaseException:
            self._call.cancel()
            raise
        raise StopIteration

    def __del__(self) -> None:
        self._call.cancel()


# ---- errors -----------------------------------------------------------------------------------------------------


@contextmanager
def _open() -> Iterator[None]:
    """Around what begins a call: grpc's own words for a channel that was closed."""
    try:
        yield
    except (ValueError, grpc.aio.UsageError):
        raise PagewireError("CANCELLED", "the client was closed") from None


class _Errors:
    """Turns a failed call into a PagewireError; asks who is there when no router has answered. Blocking."""

    def __init__(self, address: str, security: Security) -> None:
        self._address = address
        self._security = security

    def of(self, error: Any, answered: bool = False) -> PagewireError:
        """`answered`: the call had begun to give an answer, so that its address is right."""
        code: grpc.StatusCode = error.code()
        sentence = error.details() or code.name
        status = rpc_status.from_call(error)
        if status is not None:
            return _from_details(code.name, sentence, status.details)
        if code is grpc.StatusCode.CANCELLED:
            code = grpc.StatusCode.UNAVAILABLE  # nobody here asked for it
        if code is grpc.StatusCode.UNAVAILABLE:
            lost = f"the connection to the router at {self._address} was lost before the answer was complete"
            sentence = lost if answered else diagnosis.unreachable(self._address, sentence, bool(self._security.cert))
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            sentence = diagnosis.not_a_router(self._address, self._has_service)
        elif sizes := _TOO_LARGE.search(sentence):
            sentence = f"the message has {sizes[1]} bytes, and a message may have at most {sizes[2]}"
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            sentence = "the deadline passed before the answer was complete"
        return PagewireError(code.name, sentence)

    def _has_service(self, name: str) -> bool:
        """By the health service, which every server of ours has: an unknown service is an error there."""
        metadata = (("authorization", f"Bearer {self._security.token}"),) if self._security.token else ()
        with _open_blocking_channel(self._address, self._security) as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=name)
                stub: Any = health_pb2_grpc.HealthStub(channel)
                stub.Check(request, timeout=diagnosis.PROBE_S, metadata=metadata)
            except grpc.RpcError:
                return False
        return True


def _from_details(code: str, sentence: str, details: Any) -> PagewireError:
    field, retry_after, facts = None, None, {}
    for packed in details:
        if packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest.FromString(packed.value)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_after = from_duration(error_details_pb2.RetryInfo.FromString(packed.value).retry_delay)
        elif packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            facts = dict(error_details_pb2.ErrorInfo.FromString(packed.value).metadata)
    return PagewireError(code, sentence, field, retry_after, facts)


def _open_blocking_channel(address: str, security: Security) -> grpc.Channel:
    options = (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)
