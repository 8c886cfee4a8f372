"""`python -m tests.sim SEED [--lossy]` replays one run with a trace; `python -m tests.sim FIRST LAST` runs many."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from tests.sim.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--lossy", action="store_true", help="drop and repeat single messages")
    options = parser.parse_args()
    if options.last is None:
        print(World(options.seed, lossy=options.lossy, trace=True).run())
        return
    codes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    events, bad, began = 0, [], time.perf_counter()
    for seed in range(options.seed, options.last):
        try:
            report = World(seed, lossy=options.lossy).run()
        except Exception as error:
            bad.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        codes += report.codes
        faults += report.faults
        seen += report.seen
        events += report.events
    seconds = time.perf_counter() - began
    print(f"{options.last - options.seed} seeds, {events} events, {seconds:.1f} s; bad: {bad}")
    print(dict(codes))
    print(dict(faults))
    print(dict(seen))


main()
