"""What answers at an address where no router did: one sentence for a user who typed the wrong port.

Blocking, a second at the most; only called after a call has failed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

ROUTER_PORT = 50051
PROBE_S = 1.0
WORKERS = {"pagewire.v1.PrefillService": "prefill", "pagewire.v1.DecodeService": "decode"}


def unreachable(address: str, details: str, encrypted: bool = False) -> str:
    """For a call that got no answer in gRPC. `encrypted`: it was made over TLS."""
    try:
        first = _first_bytes(address)
    except ValueError:
        return f"{address!r} is no address: give the router's host:port, such as 127.0.0.1:{ROUTER_PORT}"
    except socket.gaierror:
        if "/" in address.removeprefix("dns:///"):
            return f"{address!r} is no address: give host:port alone, such as 127.0.0.1:{ROUTER_PORT}"
        return f"the host of {address} is not known"
    except OSError:
        return f"nothing answers at {address}: start a router there, or give the address of the one that runs"
    if first.startswith(b"HTTP/"):
        return f"{address} speaks HTTP, not gRPC; the router's gRPC port is {ROUTER_PORT} unless it was changed"
    if not first and not encrypted and _speaks_tls(address):
        return f"{address} speaks TLS, and this client does not: give --tls-cert, --tls-key and --tls-ca"
    return f"{address} is there, but the call failed: {details}"


def not_a_router(address: str, has_service: Callable[[str], bool]) -> str:
    """For a gRPC server without GenerationService. `has_service` asks it for a service by its full name."""
    for service, role in WORKERS.items():
        if has_service(service):
            host = address.rpartition(":")[0]
            return f"{address} is a {role} worker; the router listens on {host}:{ROUTER_PORT} unless it was changed"
    return f"{address} is a gRPC server, but not a Pagewire router; the router's port is {ROUTER_PORT} by default"


def _connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), PROBE_S)
    connection.settimeout(PROBE_S)
    return connection


def _speaks_tls(address: str) -> bool:
    """Trusts nobody and sends nothing: it only looks whether a handshake begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(address) as connection, context.wrap_socket(connection):
            return True
    except OSError:
        return False


def _first_bytes(address: str) -> bytes:
    """What the other side says to an HTTP request. A gRPC server sends its HTTP/2 settings."""
    with _connect(address) as connection:
        connection.sendall(b"HEAD / HTTP/1.1\r\nHost: pagewire\r\nConnection: close\r\n\r\n")
        try:
            return connection.recv(16)
        except OSError:
            return b""
