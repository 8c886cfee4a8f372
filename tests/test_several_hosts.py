"""Router and workers as if each ran on a host of its own: started by hand, under mTLS, by address and by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer

from cluster import START_SECONDS
from test_pagewire_cli import pagewire

from pagewire.cli.processes import child_environment

TLS = Path(__file__).parent / "tls"


def mtls(certificate: str) -> tuple[str, ...]:
    return "--tls-cert", str(TLS / certificate), "--tls-key", str(TLS / "host.key"), "--tls-ca", str(TLS / "ca.pem")


@contextmanager
def running(module: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, "--model", "random:tiny", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(),
    )
    assert process.stdout
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    seen = []
    assert process.stdout
    late = Timer(START_SECONDS, process.kill)
    late.start()
    try:
        for line in process.stdout:
            seen.append(line)
            if words in line:
                return
    finally:
        late.cancel()
    raise AssertionError("".join(seen))


def test_three_hosts_find_each_other_by_address_and_by_name(
    free_ports: Callable[[int], list[int]], model_cache: Path
) -> None:
    """The prefill worker listens on every address and its certificate knows only its name."""
    router, prefill, decode = free_ports(3)
    shared = ("--cache-dir", str(model_cache))
    sizes = ("--kv-memory", "16MiB", "--workers-on-host", "2")
    at_name, at_address = f"localhost:{prefill}", f"127.0.0.3:{decode}"
    with ExitStack() as stack:

        def start(module: str, *flags: str) -> subprocess.Popen[str]:
            return stack.enter_context(running(module, *shared, *flags))

        named = ("--host", "0.0.0.0", "--advertise", at_name, *mtls("localhost.pem"))
        workers = [
            start("prefill_service", "--port", str(prefill), *named, *sizes),
            start("decode_service", "--port", str(decode), "--host", "127.0.0.3", *mtls("host.pem"), *sizes),
        ]
        for worker in workers:
            wait_for(worker, "ready at")
        targets = ("--prefill", at_name, "--decode", at_address)
        front = start("router", "--port", str(router), "--host", "127.0.0.2", *mtls("host.pem"), *targets)
        wait_for(front, "router: ready")
        reach = ("--address", f"127.0.0.2:{router}", *mtls("localhost.pem"))
        answer = pagewire("generate", "hello, over there", "--max-tokens", "4", *reach)
        assert answer.returncode == 0 and answer.stdout, answer.stderr
        listed = pagewire("ps", *reach).stdout
        assert f"127.0.0.1:{prefill}" in listed and at_address in listed
