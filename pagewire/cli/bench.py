"""`pagewire bench`: the group of commands that measure. Each takes flags and hands them to a module of benchmarks/.

Nothing of benchmarks/ or engine/ is imported before its command runs, so that --help answers at once. Measures nothing
itself.
"""

from __future__ import annotations

import typer

bench = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure a running server (serve), the kernels, the KV transfer, or the engine offline.",
)


@bench.callback()
def _group() -> None:
    """A group even while it has one command."""
