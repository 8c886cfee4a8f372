"""Binding a server to an address, with a sentence that names who holds the port when it is taken."""

from __future__ import annotations

import socket

import grpc.aio
import psutil

from wire.security import Security


class PortTaken(OSError):
    """Somebody else listens there. str() names the port, the process and the next free port."""


def at(host: str, port: int) -> str:
    """As gRPC and people write it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, security: Security) -> int:
    """Adds host:port to the server and returns the port (0 asks the system for one).

    Raises InsecureAddress where nothing protects a public address, PortTaken where the port is in use.
    """
    security.check_host(host)
    credentials = security.server_credentials()
    address = at(host, port)
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise PortTaken(taken_sentence(host, port)) from error
    if bound == 0:
        raise PortTaken(taken_sentence(host, port))
    return bound


def listen(host: str, port: int, security: Security, flag: str = "--http-port") -> socket.socket:
    """A TCP socket that listens at host:port, for a server that is not gRPC's. Raises as `bind` does, naming `flag`."""
    security.check_host(host)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise PortTaken(taken_sentence(host, port).replace("--port", flag)) from error
    return listening


def check_free(host: str, port: int) -> None:
    """Raises PortTaken if nothing could listen at host:port now."""
    if port and not is_free(host, port):
        raise PortTaken(taken_sentence(host, port))


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


def taken_sentence(host: str, port: int) -> str:
    if not is_free(host, 0):
        return f"cannot listen on {host}:{port}: is {host} an address of this machine?"
    holder = _holder(port)
    free = next((candidate for candidate in range(port + 1, min(port + 100, 65536)) if is_free(host, candidate)), None)
    advice = f"; port {free} is free, choose it with --port {free}" if free else ""
    return f"port {port} on {host} is taken by {holder or 'another process'}{advice}"


def _holder(port: int) -> str | None:
    """`name (pid N)` of whoever listens on the port, as far as this user may see it."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.AccessDenied, OSError):
        return None
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if listens and connection.pid:
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None
