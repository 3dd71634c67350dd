"""From samples to the figures that are reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

OUTLIER = 2.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed (nearest rank, no interpolation)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def outliers(values: Sequence[float]) -> list[int]:
    """Return which values lie more than `OUTLIER` times above or below the median: something else ran meanwhile."""
    median = statistics.median(values)
    return [index for index, value in enumerate(values) if not median / OUTLIER <= value <= median * OUTLIER]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure measured several times."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its sender saw it. Times in seconds since the traffic began."""

    at_s: float  # when it was due, so that a sender who falls behind does not flatter the server
    first_s: float | None  # when its first token came; None: never
    end_s: float
    num_prompt: int
    num_new: int  # tokens that came
    error: str | None = None

    @property
    def latency_s(self) -> float:
        """From due to complete."""
        return self.end_s - self.at_s

    @property
    def first_token_s(self) -> float | None:
        """From due to the first token; None: it never came."""
        return None if self.first_s is None else self.first_s - self.at_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first; None where there is none."""
        return None if self.first_s is None or self.num_new < 2 else (self.end_s - self.first_s) / (self.num_new - 1)


def summarize(served: Sequence[Served]) -> dict[str, float | int]:
    """Return what a run is judged by.

    Rates count completed requests and their generated tokens, over the time from the start of the traffic to
    the last completion, as the thesis does. Time per output token leaves the first token out.
    """
    done = [each for each in served if each.error is None]
    result: dict[str, float | int] = {"num_requests": len(served), "num_failed": len(served) - len(done)}
    if not done:
        return result
    span_s = max(each.end_s for each in done)
    latencies = [each.latency_s for each in done]
    firsts = [each.first_token_s for each in done if each.first_token_s is not None]
    gaps = [each.per_token_s for each in done if each.per_token_s is not None]
    result |= {
        "duration_s": span_s,
        "requests_per_s": len(done) / span_s,
        "tokens_per_s": sum(each.num_new for each in done) / span_s,
    }
    for name, values in (("latency", latencies), ("first_token", firsts), ("per_token", gaps)):
        result |= describe(name, values)
    return result


def describe(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return average, minimum, maximum, median and 99th percentile; nothing where nothing was measured."""
    if not values:
        return {}
    return {
        f"{name}_avg_s": statistics.fmean(values),
        f"{name}_min_s": min(values),
        f"{name}_max_s": max(values),
        f"{name}_p50_s": percentile(values, 50),
        f"{name}_p99_s": percentile(values, 99),
    }
