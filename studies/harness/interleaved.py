"""Measures several arms alternately, so that a drift of the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def interleaved(arms: Sequence[Name], rounds: int) -> Iterator[tuple[int, Name]]:
    """Yield each arm once a round, with the round's number. Every other round has the reverse order."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield number, arm


def measure_interleaved(
    arms: Mapping[Name, Callable[[], Result]], rounds: int, *, warm_ups: int = 1
) -> dict[Name, list[Result]]:
    """Call each arm once a round and return its results, without those of the first `warm_ups` rounds."""
    found: dict[Name, list[Result]] = {name: [] for name in arms}
    for number, name in interleaved(list(arms), warm_ups + rounds):
        result = arms[name]()
        if number >= warm_ups:
            found[name].append(result)
    return found


def seconds(call: Callable[[], object]) -> float:
    """Return the duration of one call."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def microseconds_text(durations_s: Sequence[float], per: int = 1) -> str:
    """Return the median and half the distance of the quartiles, for one of `per` things in a duration."""
    low, median, high = (duration_s / per * 1e6 for duration_s in statistics.quantiles(durations_s, n=4))
    return f"{median:.1f} ± {(high - low) / 2:.1f}"
