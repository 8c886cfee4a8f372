"""`python -m decode_service --model NAME`: one decode worker process. All it does is name its role and its stage."""

from __future__ import annotations

from collections.abc import Sequence

from decode_service.config import ROLE
from decode_service.servicer import DecodeServicer
from wire.worker import leave, run_worker


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker(ROLE, DecodeServicer, argv)


if __name__ == "__main__":
    leave(main())
