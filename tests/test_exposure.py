"""What a stranger reaches: no method of any service without the deployment's token, no ports but each process's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from cluster import Cluster, make_topology
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import generation_pb2, worker_pb2

FILES = [module.DESCRIPTOR for module in (generation_pb2, worker_pb2, health_pb2, reflection_pb2)]
OPEN = "/grpc.health.v1.Health/Check"
TOKEN = ("authorization", "Bearer s3cret")
SERVICES = {
    "router": {"pagewire.v1.GenerationService"},
    "prefill-1": {"pagewire.v1.PrefillService", "pagewire.v1.KvTransferService"},
    "decode-1": {"pagewire.v1.DecodeService"},
}
ALWAYS = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "token").write_text("s3cret\n")
    cluster = Cluster(make_topology(cache_dir=model_cache), directory)
    for name, program in cluster.programs.items():
        cluster.programs[name] = replace(program, argv=(*program.argv, "--token-file", str(directory / "token")))
    try:
        cluster.start()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.kill_all()


async def status(channel: grpc.aio.Channel, path: str, streams: bool, *header: tuple[str, str]) -> grpc.StatusCode:
    """Of a call with one empty request, up to its first answer."""

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    kind = channel.stream_stream if streams else channel.unary_stream
    while True:
        call: Any = kind(path)(nothing() if streams else b"", metadata=list(header), timeout=5.0)
        try:
            await anext(aiter(call), None)
            return grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            # The client's own words when the answer came before its request had gone out: they tell nothing.
            if error.details() != "Internal error from Core":
                return error.code()
        finally:
            call.cancel()


@pytest.mark.parametrize("name", sorted(SERVICES))
async def test_no_method_answers_without_the_token(guarded: Cluster, name: str) -> None:
    """Every method that any of our files describes, and those of health and reflection."""
    refused: set[str] = set()
    async with grpc.aio.insecure_channel(guarded.programs[name].address) as channel:
        for service in [service for file in FILES for service in file.services_by_name.values()]:
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                allowed = await status(channel, path, method.client_streaming, TOKEN)
                assert allowed is not grpc.StatusCode.UNAUTHENTICATED, path
                if allowed is grpc.StatusCode.UNIMPLEMENTED:
                    continue  # another process serves it
                for header in ([], [("authorization", "Bearer s3cre")], [("authorization", "s3cret")]):
                    code = await status(channel, path, method.client_streaming, *header)
                    assert code is (grpc.StatusCode.OK if path == OPEN else grpc.StatusCode.UNAUTHENTICATED), path
                refused.add(service.full_name)
    assert refused == SERVICES[name] | ALWAYS


def test_over_http_the_deployments_token_is_the_key(guarded: Cluster) -> None:
    url = guarded.topology.url
    refused = httpx.get(f"{url}/v1/models")
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{url}/v1/models", headers=dict([TOKEN])).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
    for port in (guarded.topology.prefill_http_port, guarded.topology.decode_http_port):
        worker = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{worker}/metrics").status_code == 401
        assert httpx.get(f"{worker}/metrics", headers=dict([TOKEN])).status_code == 200
        assert httpx.get(f"{worker}/health").status_code == 200


async def test_with_the_token_the_processes_serve_each_other(guarded: Cluster) -> None:
    """Readiness of the router says that it is attached to both stages."""
    assert all(guarded.ready(name) for name in guarded.programs)
    assert all(guarded.tracebacks(name) == [] for name in guarded.programs)


def test_each_process_listens_on_its_own_port_of_the_loopback_address_alone(cluster: Cluster) -> None:
    for name, program in cluster.programs.items():
        process = psutil.Process(cluster.processes[name].pid)
        listening = {
            f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"
            for each in (process, *process.children(recursive=True))
            for connection in each.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        topology = cluster.topology
        http = {
            "router": topology.http_port,
            "prefill": topology.prefill_http_port,
            "decode": topology.decode_http_port,
        }
        own = {program.address, f"127.0.0.1:{http[name.partition('-')[0]]}"}
        assert listening == own, f"{name} listens on {listening}"
        assert program.address.startswith("127.0.0.1:")
        datagrams = [each for each in process.net_connections("udp") if each.laddr]
        assert not datagrams, f"{name} has {datagrams}"
