"""When requests are sent: seconds after the start, fixed before the first one. Pure, and the same for a seed."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def send_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Gaps of a gamma distribution with this shape; 1 is a Poisson process, more is more even.

    As in `vllm bench serve`, they are scaled so that the last request is sent at count / rate: the offered load is
    what was asked for, and not a draw of it.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = list(accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(count)))
    scale = count / rate / times[-1] if times and times[-1] > 0 else 0.0
    return [time * scale for time in times]
