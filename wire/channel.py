"""gRPC options that every process shares, and the one place that opens channels and servers.

Internal links (router to worker, worker to worker) find a dead peer within 3 s by transport pings; public links
ping rarely. Retries are off everywhere: only the router decides to run something again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from wire.security import Security, TokenCheck, TokenSender

MAX_MESSAGE_BYTES = 4 * 2**20  # KV moves in 1 MiB messages; a prompt of a million token ids fits
MAX_METADATA_BYTES = 8 * 2**10

_COMMON = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.enable_retries", 0),
)

# keepalive_timeout alone does not notice a stopped peer: http2.ping_timeout has to be set beside it.
_INTERNAL_PINGS = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_PUBLIC_PINGS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER = (
    ("grpc.so_reuseport", 0),  # two servers on one port must fail, not share it
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 10_000),
)


def open_channel(address: str, security: Security, *, internal: bool, name: str = "") -> grpc.aio.Channel:
    """A channel to host:port. The caller closes it, after cancelling its calls.

    `name` is what the certificate must be for, where the address was looked up from a name; else the address's host.
    A subchannel pool of its own: a broken connection to one peer is never shared with another session.
    """
    options = [
        *_COMMON,
        *(_INTERNAL_PINGS if internal else _PUBLIC_PINGS),
        ("grpc.use_local_subchannel_pool", 1),
        # After a restart the next try must not wait for a long back-off.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    interceptors: Sequence[grpc.aio.ClientInterceptor] = TokenSender.all_kinds(security.token)
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


def open_server(security: Security, *, internal: bool) -> grpc.aio.Server:
    """A server without ports: add services, then `wire.ports.bind` it."""
    shortest_ping_ms = 500 if internal else 5_000
    options = [
        *_COMMON,
        *(_INTERNAL_PINGS if internal else _PUBLIC_PINGS),
        *_SERVER,
        ("grpc.http2.min_ping_interval_without_data_ms", shortest_ping_ms),
    ]
    interceptors = [TokenCheck(security.token)] if security.token else []
    return grpc.aio.server(options=options, interceptors=interceptors)


async def write(context: grpc.aio.ServicerContext, message: Any) -> None:
    """Sends a message of a server's stream. A peer that is gone ends the handler as its cancellation would.

    The write may fail before grpc knows that the call is over: without this it logs a traceback for each of them.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError("the peer is gone") from None
