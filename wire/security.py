"""Who may talk to whom: mTLS files, a deployment token, and the rule for open addresses.

Loopback needs nothing. Any other address needs mTLS or a token, or `--insecure` typed out. The token check
denies by default: every method needs it, but for the standard health check that probes call.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    import ssl

_OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})  # not Watch: a stranger could hold streams open


class InsecureAddress(ValueError):
    """An address that others can reach was asked for without mTLS, token or --insecure."""


@dataclass(frozen=True, slots=True)
class Security:
    """`cert`, `key` and `ca` are PEM files, all three or none; `token` is shared by one deployment."""

    token: str | None = field(default=None, repr=False)
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        files = {"--tls-cert": self.cert, "--tls-key": self.key, "--tls-ca": self.ca}
        missing = [flag for flag, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise InsecureAddress(f"mTLS needs --tls-cert, --tls-key and --tls-ca; missing: {', '.join(missing)}")
        for flag, path in files.items():
            if path is not None and not path.is_file():
                raise InsecureAddress(f"{flag} {path} is no file")

    def check_host(self, host: str) -> None:
        """Raises InsecureAddress where `host` is not loopback and nothing protects it."""
        if self.token or self.cert or self.insecure or is_loopback(host):
            return
        raise InsecureAddress(
            f"--host {host} can be reached from other machines: "
            "give --tls-cert, --tls-key and --tls-ca, or --token-file, or type --insecure"
        )

    def check_files(self, name: str = "") -> None:
        """Whether a peer with the same authority would accept the certificate, as that of host `name` if one is given.

        gRPC would say no more than that a handshake failed, each time, for ever. Raises InsecureAddress.
        """
        if not (self.cert and self.key and self.ca):
            return
        import ssl  # not needed where nothing is encrypted

        shown = f"--tls-cert {self.cert} with --tls-key {self.key} and --tls-ca {self.ca}"
        try:
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.check_hostname = bool(name)
            server.verify_mode = ssl.CERT_REQUIRED
            for side in (server, client):
                side.load_cert_chain(self.cert, self.key)
                side.load_verify_locations(self.ca)
            _shake_hands(server, client, name)
        except ssl.SSLCertVerificationError as error:
            raise InsecureAddress(f"{shown} would be refused: {error.verify_message.rstrip('.')}") from None
        except (ssl.SSLError, OSError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
            why = reason.replace("_", " ").lower() if reason else "one of them is not a PEM file of its kind"
            raise InsecureAddress(f"{shown} cannot be used: {why}") from None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        if not (self.cert and self.key and self.ca):
            return None
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())

    def server_credentials(self) -> grpc.ServerCredentials | None:
        if not (self.cert and self.key and self.ca):
            return None
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)


def _shake_hands(server_side: ssl.SSLContext, client_side: ssl.SSLContext, name: str) -> None:
    """Both halves of a TLS handshake, in memory. Raises ssl.SSLError."""
    import ssl

    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(down, up, server_hostname=name or None)
    halves = [client, server_side.wrap_bio(up, down, server_side=True)]
    while halves:
        for half in list(halves):
            try:
                half.do_handshake()
                halves.remove(half)
            except ssl.SSLWantReadError:
                continue  # the other half has to speak first


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses every call without the deployment token, before its handler sees it."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "a valid deployment token is required: give it with --token-file"
            )

        self._refusals: dict[tuple[bool, bool], grpc.RpcMethodHandler[Any, Any]] = {
            (False, False): grpc.unary_unary_rpc_method_handler(refuse),
            (False, True): grpc.unary_stream_rpc_method_handler(refuse),
            (True, False): grpc.stream_unary_rpc_method_handler(refuse),
            (True, True): grpc.stream_stream_rpc_method_handler(refuse),
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in _OPEN_METHODS:
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        given_bytes = given if isinstance(given, bytes) else given.encode("utf-8", "replace")
        if hmac.compare_digest(given_bytes, self._expected):
            return handler
        return self._refusals[(handler.request_streaming, handler.response_streaming)]


class TokenSender:
    """Adds the token to every call of a channel. grpc.aio wants one interceptor class per kind of call."""

    @staticmethod
    def all_kinds(token: str | None) -> list[grpc.aio.ClientInterceptor]:
        if not token:
            return []
        header = ("authorization", f"Bearer {token}")
        return [_UnaryUnary(header), _UnaryStream(header), _StreamUnary(header), _StreamStream(header)]


def _with_header(details: grpc.aio.ClientCallDetails, header: tuple[str, str]) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), header)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request_iterator)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request_iterator)
