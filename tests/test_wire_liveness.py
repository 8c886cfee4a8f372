"""A silent peer is dead after three seconds; our own lag is never held against it."""

from __future__ import annotations

from wire.liveness import Liveness


def ticked(liveness: Liveness, until: float, start: float = 0.0, step: float = 0.25) -> float | None:
    """The first time in (start, until] at which the peer counted as dead."""
    now = start
    while now < until:
        now += step
        if not liveness.alive(now):
            return now
    return None


def test_a_peer_that_never_speaks_is_dead_after_three_seconds() -> None:
    dead_at = ticked(Liveness(0.0), until=10.0)
    assert dead_at is not None and 3.0 < dead_at <= 3.5


def test_every_completed_read_restarts_the_clock() -> None:
    liveness = Liveness(0.0)
    for second in range(1, 20):
        assert ticked(liveness, until=float(second), start=second - 1.0) is None
        liveness.heard(float(second))


def test_a_stall_of_this_process_is_no_verdict_about_the_peer() -> None:
    liveness = Liveness(0.0)
    assert ticked(liveness, until=1.0) is None
    assert liveness.alive(31.0), "stopped for 30 s ourselves: the peer's heartbeats wait in the socket"
    dead_at = ticked(liveness, until=60.0, start=31.0)
    assert dead_at is not None and dead_at <= 33.5, "and yet a peer that stays silent is found"
