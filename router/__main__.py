"""`python -m router`: sets what gRPC reads when it is imported, then runs router.process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # the child that prepares a model only execs
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from router.process import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
