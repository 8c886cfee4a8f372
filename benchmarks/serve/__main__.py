"""`python -m benchmarks.serve` is `pagewire bench serve`."""

from __future__ import annotations

import sys

from pagewire.cli import main

sys.argv[1:1] = ["bench", "serve"]
main()
