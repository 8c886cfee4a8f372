"""Router and workers as if each ran on a host of its own: started by hand, under mTLS, by address and by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from by_hand import Started, started
from test_pagewire_cli import pagewire

TLS = Path(__file__).parent / "tls"


def mtls(certificate: str) -> tuple[str, ...]:
    return "--tls-cert", str(TLS / certificate), "--tls-key", str(TLS / "host.key"), "--tls-ca", str(TLS / "ca.pem")


def test_three_hosts_find_each_other_by_address_and_by_name(
    free_ports: Callable[[int], list[int]], model_cache: Path, tmp_path: Path
) -> None:
    """The prefill worker listens on every address and its certificate knows only its name."""
    router, prefill, decode = free_ports(3)
    sizes = ("--kv-memory", "16MiB", "--workers-on-host", "2")
    at_name, at_address = f"localhost:{prefill}", f"127.0.0.3:{decode}"
    with ExitStack() as stack:

        def start(module: str, *flags: str) -> Started:
            model = ("--model", "random:tiny", "--cache-dir", str(model_cache))
            return stack.enter_context(started(tmp_path, module, *model, *flags))

        named = ("--host", "0.0.0.0", "--advertise", at_name, *mtls("localhost.pem"))
        start("prefill_service", "--port", str(prefill), *named, *sizes)
        start("decode_service", "--port", str(decode), "--host", "127.0.0.3", *mtls("host.pem"), *sizes)
        targets = ("--prefill", at_name, "--decode", at_address)
        front = start("router", "--port", str(router), "--host", "127.0.0.2", *mtls("host.pem"), *targets)
        front.wait_for("router: ready")
        reach = ("--address", f"127.0.0.2:{router}", *mtls("host.pem"))
        answer = pagewire("generate", "hello, over there", "--max-tokens", "4", *reach)
        assert answer.returncode == 0 and answer.stdout, answer.stderr
        listed = pagewire("ps", *reach).stdout
        assert f"127.0.0.1:{prefill}" in listed and at_address in listed
