"""Tracing as its operator sees it: one trace per request over all processes, and silence where nobody asked for it."""

from __future__ import annotations

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
