"""How an operator follows one request over all processes: by its trace, where somebody asked for one, and by its id in
every log line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import httpx
import pytest
from cluster import Cluster, running_cluster
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from protos import generation_pb2 as gpb
from protos import generation_pb2_grpc
from wire.tracing import OFF, Incoming, start

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
STAGES = {
    "route",
    "prefill",
    "prefill.queue",
    "prefill.compute",
    "decode",
    "kv.transfer",
    "decode.queue",
    "decode.compute",
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets: service name and span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            service = values(resource.resource)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, names: set[str]) -> dict[str, tuple[str, Any]]:
        """By name, once all these are there."""
        deadline = time.monotonic() + 20
        while True:
            found = {span.name: (service, span) for service, span in self.spans if span.trace_id.hex() == trace_id}
            if names <= found.keys():
                return found
            assert time.monotonic() < deadline, f"only {sorted(found)} came"
            time.sleep(0.05)


def values(message: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in message.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    with ThreadPoolExecutor(2) as threads:
        server, kept = grpc.server(threads), Collector()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield kept, f"http://127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture(scope="module")
def traced(collector: tuple[Collector, str], model_cache: Path, tmp_path_factory: Any) -> Iterator[Cluster]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector[1], "OTEL_BSP_SCHEDULE_DELAY": "100"}
    environment["PAGEWIRE_LOG_LEVEL"] = "debug"
    with (
        patch.dict(os.environ, environment),
        running_cluster(tmp_path_factory.mktemp("traced"), cache_dir=model_cache) as cluster,
    ):
        yield cluster


def check(found: dict[str, tuple[str, Any]], root: str) -> dict[str, Any]:
    """Every span stands under its parent, within its parent's time, in the process that made it."""
    spans = {name: span for name, (_, span) in found.items()}
    parents = {name: root for name in ("route", "prefill", "decode")}
    parents |= {name: "prefill" for name in ("prefill.queue", "prefill.compute")}
    parents |= {name: "decode" for name in ("kv.transfer", "decode.queue", "decode.compute")}
    assert {name: spans[parent].span_id for name, parent in parents.items()} == {
        name: spans[name].parent_span_id for name in parents
    }
    for name, parent in parents.items():
        inside = spans[parent].start_time_unix_nano - 5_000_000 <= spans[name].start_time_unix_nano
        assert inside and spans[name].start_time_unix_nano <= spans[name].end_time_unix_nano, name
    services = {root: "router", "route": "router", "prefill.compute": "prefill", "kv.transfer": "decode"}
    assert {name: found[name][0] for name in services} == {n: f"pagewire-{role}" for n, role in services.items()}
    return spans


def test_one_trace_goes_from_an_http_client_through_every_process(
    traced: Cluster, collector: tuple[Collector, str]
) -> None:
    body = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 6, "temperature": 0.5, "seed": 3}
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "mine"}
    with httpx.Client(base_url=traced.topology.url, trust_env=False) as client:
        answer = client.post("/v1/chat/completions", json=body | {"ignore_eos": True}, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    root = f"chat {answer.json()['model']}"
    spans = check(collector[0].trace(TRACE, STAGES | {root}), root)
    assert spans[root].parent_span_id.hex() == CALLER and spans[root].trace_state == "vendor=1"
    said = values(spans[root])
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.max_tokens"] == 6
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] and said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.response.id"] == values(spans["decode"])["gen_ai.request.id"] == "mine"
    assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
    moved = values(spans["kv.transfer"])
    assert moved["pagewire.kv.owner"] == traced.programs["prefill-1"].address and moved["pagewire.kv.blocks"] > 0
    assert "secret" not in str(collector[0].spans)


def test_one_trace_goes_from_a_grpc_client_and_a_refusal_is_an_error_span(
    traced: Cluster, collector: tuple[Collector, str]
) -> None:
    trace_id = "a" * 32
    metadata = (("traceparent", f"00-{trace_id}-{CALLER}-01"), ("x-request-id", "by metadata"))
    with grpc.insecure_channel(traced.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        asked = gpb.GenerateRequest(text="hello", stopping=gpb.StoppingParams(max_tokens=4, ignore_eos=True))
        answer, call = stub.Generate.with_call(asked, metadata=metadata)
        assert answer.request_id == "by metadata" and dict(call.trailing_metadata())["x-request-id"] == "by metadata"
        root = f"text_completion {answer.model}"
        check(collector[0].trace(trace_id, STAGES | {root}), root)
        refused = (("traceparent", f"00-{'b' * 32}-{CALLER}-01"),)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(gpb.GenerateRequest(text="hello " * 9000), metadata=refused)
        assert "x-request-id" in dict(caught.value.trailing_metadata())  # type: ignore[attr-defined]
    _, span = collector[0].trace("b" * 32, {root})[root]
    assert (span.status.code, span.status.message) == (2, "INVALID_ARGUMENT")


def test_an_unsampled_trace_leaves_no_span(traced: Cluster, collector: tuple[Collector, str]) -> None:
    with grpc.insecure_channel(traced.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        asked = gpb.GenerateRequest(text="hi", stopping=gpb.StoppingParams(max_tokens=2, ignore_eos=True))
        stub.Generate(asked, metadata=(("traceparent", f"00-{'c' * 32}-{CALLER}-00"),))
        answer = stub.Generate(asked, metadata=(("traceparent", f"00-{'d' * 32}-{CALLER}-01"),))
    collector[0].trace("d" * 32, {f"text_completion {answer.model}", "decode"})
    assert not [span for _, span in collector[0].spans if span.trace_id.hex() == "c" * 32]


def test_a_requests_id_is_in_each_line_of_each_process_and_its_words_are_in_none(traced: Cluster) -> None:
    body = {"prompt": "zebra crossing", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "unheard_of": 1}
    with httpx.Client(base_url=traced.topology.url, trust_env=False, timeout=30) as client:
        done = client.post("/v1/completions", json=body, headers={"x-request-id": "find me"})
        refused = client.post("/v1/completions", json=body | {"max_tokens": -1}, headers={"x-request-id": "no 2"})
        minted = client.post("/v1/completions", json=body)
    assert done.headers.get_list("x-request-id") == ["find me"] and refused.status_code == 400
    assert refused.headers["x-request-id"] == "no 2" and len(minted.headers["x-request-id"]) == 32
    for name in traced.programs:
        lines = [json.loads(line) for line in traced.written(name).splitlines() if line.startswith("{")]
        assert all(line["role"] == name.partition("-")[0] and line["timestamp"] for line in lines)
        mine = {line["event"] for line in lines if line.get("request_id") == "find me"}
        assert "request_ended" in mine, f"{name} says only {mine}"
        anonymous = [line for line in lines if line["event"].startswith("request_") and not line.get("request_id")]
        assert not anonymous, anonymous
        assert any(line.get("request_id") == minted.headers["x-request-id"] for line in lines)
        assert "zebra" not in traced.written(name) and str(done.json()["choices"][0]["text"]) not in traced.written(
            name
        )


def test_stage_times_and_cached_tokens_come_with_the_answer(traced: Cluster) -> None:
    body = {"prompt": "once more with feeling " * 4, "max_tokens": 4, "ignore_eos": True}
    names = {f"{stage}_ms" for stage in ("queue", "prefill", "kv_transfer", "decode", "time_to_first_token")}
    with httpx.Client(base_url=traced.topology.url, trust_env=False, timeout=30) as client:
        client.post("/v1/completions", json=body)
        again = client.post("/v1/completions", json=body).json()
        stream = client.post("/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(stream.text.split("data: ")[-2])
    for answer in (again, last):
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert answer["pagewire"].keys() == names and answer["pagewire"]["time_to_first_token_ms"] > 0


def test_what_libraries_log_has_the_same_shape() -> None:
    code = """
import logging
from wire import logs
logs.configure("router")
logging.getLogger("uvicorn.error").warning("odd %s", "thing")
logging.getLogger("uvicorn.error").info("too small to be said")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = json.loads(done.stderr)
    assert (line["event"], line["role"], line["level"], line["logger"]) == (
        "odd thing", "router", "warning", "uvicorn.error",
    )  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
    ],
)
def test_tracing_is_off_where_the_environment_does_not_ask_for_it_or_asks_for_what_is_not_there(
    environ: dict[str, str],
) -> None:
    assert start(environ, "router", "r") is OFF
    sent = Incoming.of(TRACEPARENT, "vendor=1")
    assert OFF.begin("chat", sent, {}).traceparent == TRACEPARENT, "a caller's context goes on to the workers"


def test_a_collector_that_is_not_there_holds_nobody_up() -> None:
    """Neither a request's spans nor the end of the process wait for it."""
    code = """
import asyncio, os, time
from wire.tracing import NOTHING, start
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
tracing = start(os.environ, "router", "r")
began = time.monotonic()
tracing.begin("chat", NOTHING, {}).end({})
tracing.record("prefill", "", began, began, {})
assert time.monotonic() - began < 0.5
asyncio.run(tracing.close())
print(time.monotonic() - began)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 4 and time.monotonic() - began < 10, "the process ends with it"


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from wire import logs
from wire.tracing import OFF, start
logs.configure("router")
assert start({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, "router", "r") is OFF
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1 and "pip install 'pagewire[otel]'" in done.stderr


@pytest.mark.parametrize(
    "wrong", ["", "x", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{'0' * 16}-01", TRACEPARENT + "x"]
)
def test_a_traceparent_that_is_none_is_ignored(wrong: str) -> None:
    assert Incoming.of(wrong, "vendor=1") == Incoming()
