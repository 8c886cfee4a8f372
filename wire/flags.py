"""How every process reads its flags, and the flags that say who may talk to it.

A flag that is not given is looked up in the environment (--kv-memory is PAGEWIRE_KV_MEMORY), then in the file that
--config names. What is wrong becomes BadOption, one sentence. Knows no process's own flags; starts and opens nothing
but the files that are named.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from wire.security import InsecureAddress, Security

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class BadOption(ValueError):
    """A flag or its environment variable is wrong; str() is one sentence that names it."""


class Parser(argparse.ArgumentParser):
    """Raises BadOption instead of ending the process. `--help` prints and exits."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(name, description=description, allow_abbrev=False)
        self.add_argument("--config", type=Path, metavar="FILE", help="YAML file of flags: `kv-memory: 4GiB`")

    def error(self, message: str) -> NoReturn:
        raise BadOption(message)

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
        """The command line first, then the environment, then the file."""
        given = [*self._missing(argv, _variables(environ)), *argv]
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        config.add_argument("--config", type=Path, nargs="?")
        if (file := config.parse_known_args(given)[0].config) is not None:
            from wire.config_file import read_config_file

            in_file = read_config_file(
                file, {flag[2:].replace("-", "_") for flag, _ in self._flags() if flag != "--config"}
            )
            given = [*self._missing(given, in_file), *given]
        return self.parse_args(given)

    def _flags(self) -> list[tuple[str, argparse.Action]]:
        return [(action.option_strings[-1], action) for action in self._actions if action.dest != "help"]

    def _missing(self, argv: Sequence[str], values: Mapping[str, str | bool | list[str]]) -> list[str]:
        """As flags: those values, by flag name with underscores, whose flags are not given."""
        found: list[str] = []
        named = {part.split("=")[0] for part in argv}
        for flag, action in self._flags():
            value = values.get(flag[2:].replace("-", "_"))
            if value is None or flag in named:
                continue
            if action.nargs == 0:
                found += [flag] if value is True or str(value).lower() in ("1", "true", "yes") else []
            else:
                found += [f"{flag}={word(each)}" for each in (value if isinstance(value, list) else [value])]
        return found


def word(value: str | bool) -> str:
    """YAML reads on and off as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """By flag name with underscores."""
    prefix = variable("")
    return {name[len(prefix) :].lower(): value for name, value in environ.items() if name.startswith(prefix)}


def variable(flag: str) -> str:
    """The environment variable that stands for a flag."""
    return "PAGEWIRE_" + flag.lstrip("-").replace("-", "_").upper()


@dataclass(frozen=True, slots=True)
class SecurityFlags:
    """As they were typed, so that `pagewire up` can pass them on. The names are the flags'."""

    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    insecure: bool = False

    def read(self) -> Security:
        """Reads the token; looks whether the other files fit each other. Raises BadOption."""
        try:
            security = Security(_token(self.token_file), self.tls_cert, self.tls_key, self.tls_ca, self.insecure)
            security.check_files()
        except InsecureAddress as error:
            raise BadOption(str(error)) from None
        return security

    def argv(self) -> tuple[str, ...]:
        given = {f"--{each.name.replace('_', '-')}": getattr(self, each.name) for each in fields(self)}
        paths = [part for flag, value in given.items() if isinstance(value, Path) for part in (flag, str(value))]
        return (*paths, *(("--insecure",) if self.insecure else ()))


def add_security_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--token-file", type=Path, help="file with the deployment's token")
    add("--tls-cert", type=Path, help="PEM file of this process's certificate")
    add("--tls-key", type=Path, help="PEM file of its key")
    add("--tls-ca", type=Path, help="PEM file of the authority that signed all certificates")
    add("--insecure", action="store_true", help="listen on a public address with neither mTLS nor a token")


def security_of(given: argparse.Namespace) -> Security:
    """Raises BadOption."""
    return SecurityFlags(**{each.name: getattr(given, each.name) for each in fields(SecurityFlags)}).read()


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BadOption(f"--token-file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOption(f"--token-file {file} is not UTF-8") from None
    if not token:
        raise BadOption(f"--token-file {file} is empty")
    if not token.isascii() or not token.isprintable():
        raise BadOption(f"--token-file {file} must hold one line of printable ASCII")
    return token


# ---- values -------------------------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """`1GiB`, `512MiB`, `2G`, or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory such as 4GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """A reader of whole numbers in [low, high]."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number in [{low}, {high}], got {text!r}")
        return int(text)

    return read


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a part in (0, 1], got {text!r}")
    return value


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"must be GB/s in [0, 10000], got {text!r}")
    return value


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds in [0, 86400], got {text!r}")
    return value
