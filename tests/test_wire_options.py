"""Flags and environment variables of a worker, as the person who types them meets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.flags import BadOption, parse_bytes
from wire.options import Role, parse

ROLE = Role("prefill", "pagewire.v1.PrefillService", 50061, 8061, 32, 512)


def test_a_model_is_all_that_is_needed() -> None:
    options = parse(ROLE, ["--model", "smollm2"], {})
    assert (options.host, options.port) == ("127.0.0.1", 50061)
    assert options.name == "prefill-50061" and options.kv_memory is None and options.threads >= 1
    assert options.address(50061) == "127.0.0.1:50061"


def test_a_flag_wins_over_its_variable() -> None:
    environ = {"PAGEWIRE_PORT": "1", "PAGEWIRE_KV_MEMORY": "64MiB", "PAGEWIRE_INSECURE": "1", "PAGEWIRE_MODEL": "m"}
    options = parse(ROLE, ["--port", "2"], environ)
    assert (options.port, options.kv_memory, options.model) == (2, 64 * 2**20, "m")
    assert options.security.insecure


def test_workers_on_a_host_share_its_cores() -> None:
    alone = parse(ROLE, ["--model", "m"], {}).threads
    shared = parse(ROLE, ["--model", "m", "--workers-on-host", "2"], {}).threads
    assert shared == max(1, alone // 2)
    assert parse(ROLE, ["--model", "m", "--threads", "3"], {}).threads == 3


def test_a_wildcard_host_is_advertised_by_the_name_of_the_machine() -> None:
    options = parse(ROLE, ["--model", "m", "--host", "0.0.0.0"], {})
    assert not options.address(7).startswith("0.0.0.0")
    assert parse(ROLE, ["--model", "m", "--advertise", "gpu1:9"], {}).address(7) == "gpu1:9"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--model is missing"),
        (["--model", "m", "--port", "70000"], "--port: must be a whole number in [0, 65535], got '70000'"),
        (["--model", "m", "--block-size", "17"], "--block-size"),
        (["--model", "m", "--kv-memory", "lots"], "'lots' is no amount of memory such as 4GiB"),
        (["--model", "m", "--dtype", "int3"], "--dtype"),
        (["--model", "m", "--grace", "-1"], "--grace"),
        (["--model", "m", "--frobnicate"], "--frobnicate"),
        (["--model", "m", "--tls-cert", "x.pem"], "--tls-key"),
        (["--model", "m", "--token-file", "/nonexistent"], "--token-file"),
    ],
)
def test_a_wrong_flag_is_named_in_one_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse(ROLE, argv, {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" secret\n")
    assert parse(ROLE, ["--model", "m", "--token-file", str(file)], {}).security.token == "secret"
    file.write_text("\n")
    with pytest.raises(BadOption, match="is empty"):
        parse(ROLE, ["--model", "m", "--token-file", str(file)], {})


@pytest.mark.parametrize(
    ("text", "value"), [("1GiB", 2**30), ("1.5G", 1_500_000_000), ("512 MiB", 2**29), ("4096", 4096), ("2kib", 2048)]
)
def test_memory_is_written_as_people_write_it(text: str, value: int) -> None:
    assert parse_bytes(text) == value
