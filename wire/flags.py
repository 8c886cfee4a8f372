"""How every process reads its flags, and the flags that say who may talk to it.

A flag that is not given is looked up in the environment: --kv-memory is PAGEWIRE_KV_MEMORY. What is wrong becomes
BadOption, one sentence. Knows no process's own flags; starts and opens nothing but the files that are named.
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

    def error(self, message: str) -> NoReturn:
        raise BadOption(message)

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
        return self.parse_args([*self._from_environment(argv, environ), *argv])

    def _from_environment(self, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The variables of the flags that are not given, as flags."""
        found: list[str] = []
        for action in self._actions:
            flag = action.option_strings[-1]
            value = environ.get(variable(flag))
            if value is None or flag == "--help" or any(part.split("=")[0] == flag for part in argv):
                continue
            if action.nargs != 0:
                found.append(f"{flag}={value}")
            elif value.lower() in ("1", "true", "yes"):
                found.append(flag)
        return found


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


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds in [0, 86400], got {text!r}")
    return value
