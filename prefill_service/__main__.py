"""`python -m prefill_service --model NAME`: one prefill worker process. All it does is name its role and its stage."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_service.config import ROLE
from prefill_service.servicer import PrefillServicer
from wire.worker import leave, run_worker


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker(ROLE, PrefillServicer, argv)


if __name__ == "__main__":
    leave(main())
