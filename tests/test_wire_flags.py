"""Flags that every process has: passed on as they were typed, and refused before anything listens."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from pagewire.cli import app
from wire.flags import BadOption, Parser, SecurityFlags, add_security_flags, security_of, variable, whole
from wire.security import InsecureAddress, Security

TLS = Path(__file__).parent / "tls"
FILES = SecurityFlags(None, TLS / "host.pem", TLS / "host.key", TLS / "ca.pem")


def parser() -> Parser:
    made = Parser("pagewire test", "A test.")
    add_security_flags(made)
    made.add_argument("--name", action="append")
    made.add_argument("--size", type=whole(1, 9))
    return made


def test_what_was_typed_is_what_a_started_process_reads(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    typed = SecurityFlags(token, FILES.tls_cert, FILES.tls_key, FILES.tls_ca, insecure=True)
    read = security_of(parser().read(typed.argv(), {}))
    assert read == typed.read() == Security("secret", FILES.tls_cert, FILES.tls_key, FILES.tls_ca, True)
    assert SecurityFlags().argv() == ()


def test_a_variable_stands_for_a_flag_that_is_not_given() -> None:
    environ = {"PAGEWIRE_NAME": "-a", "PAGEWIRE_SIZE": "3", "PAGEWIRE_INSECURE": "true"}
    given = parser().read([], environ)
    assert (given.name, given.size, given.insecure) == (["-a"], 3, True)
    assert parser().read(["--name=b", "--size", "4"], environ).name == ["b"]
    with pytest.raises(BadOption, match=r"--size: must be a whole number in \[1, 9\], got '10'"):
        parser().read([], {"PAGEWIRE_SIZE": "10"})


def test_the_command_line_has_the_flags_of_the_processes_under_the_same_variables() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    flags = {f"--{each.name.replace('_', '-')}" for each in fields(SecurityFlags)}
    for name, wanted in (
        ("up", flags),
        *((each, flags - {"--insecure"}) for each in ("generate", "chat", "ps", "health")),
    ):
        found = {
            parameter.opts[0]: parameter.envvar for parameter in commands[name].params if parameter.opts[0] in flags
        }
        assert found == {flag: variable(flag) for flag in wanted}, name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"caf\xe9", "is not UTF-8"),
        (b"two\nlines", "one line"),
        ("café".encode(), "printable ASCII"),
    ],
)
def test_a_token_that_no_header_can_carry_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(BadOption, match=words):
        SecurityFlags(tmp_path / "token").read()


# ---- certificates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "127.0.0.1", "127.0.0.2", "localhost"])
def test_a_certificate_is_accepted_for_the_names_that_it_has(name: str) -> None:
    FILES.read().check_files(name)


@pytest.mark.parametrize(
    ("cert", "key", "ca", "name", "words"),
    [
        ("elsewhere.pem", "host.key", "ca.pem", "127.0.0.1", "not valid for '127.0.0.1'"),
        ("host.pem", "host.key", "host.pem", "", "unable to get local issuer certificate"),
        ("ca.pem", "host.key", "ca.pem", "", "key values mismatch"),
        ("host.key", "host.key", "ca.pem", "", "is not a PEM file of its kind"),
    ],
)
def test_files_with_which_every_handshake_would_fail_are_named(
    cert: str, key: str, ca: str, name: str, words: str
) -> None:
    with pytest.raises(InsecureAddress, match=words) as caught:
        Security(None, TLS / cert, TLS / key, TLS / ca).check_files(name)
    assert cert in str(caught.value) and "\n" not in str(caught.value)


# ---- a file of flags ----------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pagewire.yaml"
    file.write_text("name: [a, b]\nsize: 1\ninsecure: true\ntoken_file: secret\n")
    given = parser().read(["--config", str(file)], {})
    assert (given.name, given.size, given.insecure, given.token_file) == (["a", "b"], 1, True, Path("secret"))
    environ = {"PAGEWIRE_CONFIG": str(file), "PAGEWIRE_SIZE": "2"}
    assert parser().read([], environ).size == 2
    given = parser().read(["--size", "3", "--name=c"], environ)
    assert (given.size, given.name) == (3, ["c"])


def test_on_and_off_in_a_file_are_words_where_the_flag_takes_one(tmp_path: Path) -> None:
    file = tmp_path / "pagewire.yaml"
    file.write_text("mode: off\ninsecure: off\n")
    made = parser()
    made.add_argument("--mode", choices=("on", "off"))
    given = made.read([f"--config={file}"], {})
    assert (given.mode, given.insecure) == ("off", False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"siez: 3", "siez is no flag of this command; did you mean size?"),
        (b"size: {a: 1}", "size must be one value or a list of values, not dict"),
        (b"- size", "must hold a mapping of flags to values, not a list"),
        (b"size: [", "is not YAML"),
        (b"\xff\xfe\xff", "is not UTF-8"),
        (b"size: 10", r"--size: must be a whole number in \[1, 9\], got '10'"),
        (b"config: other.yaml", "config is no flag of this command"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_of_flags_is_one_sentence(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "pagewire.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadOption, match=words.replace("?", r"\?")) as caught:
        parser().read(["--config", str(file)], {})
    assert "\n" not in str(caught.value)


def test_a_token_is_in_no_words_about_the_settings() -> None:
    assert "secret" not in repr(Security(token="secret")) and Security(token="secret") != Security(token="other")
