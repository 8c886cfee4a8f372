"""Flags in a YAML file: one mapping from a flag's name, without its dashes, to its value.

`kv-memory` and `kv_memory` are the same key. A list stands for a flag that may be repeated, true for one without a
value. What is wrong becomes BadOption, one sentence that names the file and the key. Knows no process's flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from wire.flags import BadOption

Value = str | bool | list[str]


def read_config_file(file: Path, known: Collection[str]) -> dict[str, Value]:
    """By flag name with underscores; `known` are those that this process has. Raises BadOption."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOption(f"--config {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOption(f"--config {file} is not UTF-8") from None
    except yaml.YAMLError as error:
        raise BadOption(f"--config {file} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BadOption(f"--config {file} must hold a mapping of flags to values, not a {type(content).__name__}")
    return {_key(file, key, known): _value(file, key, value) for key, value in content.items() if value is not None}


def _key(file: Path, key: object, known: Collection[str]) -> str:
    name = str(key).replace("-", "_")
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
    raise BadOption(f"--config {file}: {key} is no flag of this command{meant}")


def _value(file: Path, key: object, value: object) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return [str(each) for each in value]
    raise BadOption(f"--config {file}: {key} must be one value or a list of values, not {type(value).__name__}")
