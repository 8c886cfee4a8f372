"""What the oracle raises; here, so that every part of the simulator can."""

from __future__ import annotations


class Violation(AssertionError):
    """Something happened that must never happen."""
