"""Addresses: who holds a port, and what may be reached from other machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from wire.ports import PortTaken, check_free, taken_sentence
from wire.security import InsecureAddress, Security


def test_a_taken_port_names_itself_its_process_and_a_free_one() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken) as refused:
            check_free("127.0.0.1", port)
    assert f"port {port} on 127.0.0.1 is taken by" in str(refused.value)
    assert f"(pid {os.getpid()})" in str(refused.value)
    assert "choose it with --port" in str(refused.value)


def test_an_address_of_another_machine_is_said_to_be_one() -> None:
    assert "an address of this machine?" in taken_sentence("192.0.2.1", 50051)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_nothing(host: str) -> None:
    Security().check_host(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_an_open_address_needs_tls_a_token_or_the_typed_flag(host: str, tmp_path: Path) -> None:
    with pytest.raises(InsecureAddress, match="--insecure"):
        Security().check_host(host)
    Security(insecure=True).check_host(host)
    Security(token="t").check_host(host)


def test_half_of_mtls_names_the_missing_flags(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.touch()
    with pytest.raises(InsecureAddress, match="missing: --tls-key, --tls-ca"):
        Security(cert=cert)
    with pytest.raises(InsecureAddress, match="is no file"):
        Security(cert=cert, key=cert, ca=tmp_path / "absent.pem")
