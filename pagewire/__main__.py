"""`python -m pagewire`: the same as the `pagewire` command."""

from __future__ import annotations

from pagewire.cli import main

main()
