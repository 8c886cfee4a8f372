"""`python -m engine.loader prepare NAME [--cache-dir DIR]`: make a model ready, without torch where nothing converts.

The router runs this as a child, so that the conversion's memory and libraries stay out of it. One JSON object a
line: {"phase", "fraction"} while it works, then {"dir", "name", "digest"}, or {"error": a sentence} and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from engine.config import ModelError
from engine.loader import resolve_model


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.loader", description="Make a model ready to serve.")
    prepare = parser.add_subparsers(dest="command", required=True).add_parser("prepare", help="resolve and convert")
    prepare.add_argument("name", help="directory, .gguf file, name in the Hugging Face cache, smollm2 or random:SHAPE")
    prepare.add_argument("--cache-dir", help="where converted models are kept (default ~/.cache/pagewire/models)")
    options = parser.parse_args(arguments)
    # As SystemExit, so that a conversion ends its own child and takes its temporary folder away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        source = resolve_model(
            options.name, lambda phase, fraction: _say(phase=phase, fraction=round(fraction, 3)), options.cache_dir
        )
    except (ModelError, OSError) as error:
        _say(error=str(error))
        return 1
    _say(dir=str(source.dir), name=source.name, digest=source.digest.hex())
    return 0


if __name__ == "__main__":
    sys.exit(main())
