"""Which Pagewire this is, for whoever asks a service or the command line."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    try:
        return metadata.version("pagewire")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


VERSION = _installed()
