"""`python -m shared_service --model NAME`: both stages in one process. All it does is name its role and its stage."""

from __future__ import annotations

from collections.abc import Sequence

from shared_service.config import ROLE
from shared_service.servicer import SharedServicer
from wire.worker import leave, run_worker


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker(ROLE, SharedServicer, argv)


if __name__ == "__main__":
    leave(main())
