"""What a call usually takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def usual_s(
    number: int,
    call: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median seconds of so many calls, the first left out; `before` runs before each call and is not
    timed."""
    times = []
    for _ in range(number + 1):
        before()
        start_s = clock()
        call()
        times.append(clock() - start_s)
    return statistics.median(times[1:])
