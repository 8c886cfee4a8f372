"""The standard health service: the empty name says alive, a service's full name says ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


class Health:
    """Alive from the moment it is added; each service is ready only when `set_ready` said so."""

    def __init__(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        self._services = tuple(services)
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def start(self) -> None:
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._servicer.set(service, response.SERVING if ready else response.NOT_SERVING)


async def is_ready(channel: grpc.aio.Channel, service: str, timeout: float) -> bool:
    """Whether `service` at the other end is ready; "" asks for alive. False also when nobody answers."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
