"""Numbers for Prometheus about guessed tokens: by who guessed, how far ahead, and how many were right at once.

Labels are few: a speculator is one of those that the server was started with, a depth is at most that of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeflow.engine.messages import SpeculatorStats
from moeflow.server.model_pool import ModelPool

_BY_DEPTH: tuple[tuple[str, str, Callable[[SpeculatorStats], list[int]]], ...] = (
    (
        "moeflow_speculator_drafted_tokens",
        "Guessed tokens that were computed, by who guessed (each of several who guessed the same) and how far ahead",
        lambda it: it.drafted_total,
    ),
    ("moeflow_speculator_accepted_tokens", "Of these, those that were right", lambda it: it.accepted_total),
)


class SpeculationCollector(Collector):
    """Reads snapshots when Prometheus asks. Without speculators there are no samples."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield counters of all replicas together, and for each who of it rests."""
        stats = self._models.stats()
        for name, text, of_speculator in _BY_DEPTH:
            counter = CounterMetricFamily(name, text, labels=["speculator", "depth"])
            for speculator in stats.speculators:
                for depth, value in enumerate(of_speculator(speculator), start=1):
                    counter.add_metric([speculator.name, str(depth)], value)
            yield counter
        seconds = CounterMetricFamily(
            "moeflow_speculator_drafting_seconds", "Time that its guessing took", labels=["speculator"]
        )
        for speculator in stats.speculators:
            seconds.add_metric([speculator.name], speculator.drafting_s_total)
        yield seconds
        yield _accepted_at_once(stats.trees_total)
        resting = GaugeMetricFamily(
            "moeflow_speculator_resting",
            "1 if it does not guess now, because that does not pay or it has failed",
            labels=["replica", "speculator"],
        )
        for name, replica in self._models.replicas().items():
            for speculator in replica.stats.speculators:
                resting.add_metric([name, speculator.name], speculator.is_resting)
        yield resting


def _accepted_at_once(trees: Sequence[int]) -> HistogramMetricFamily:
    """Return how many guesses for a request were right in a pass. `trees` counts them by that number, from 0 on."""
    histogram = HistogramMetricFamily(
        "moeflow_accepted_tokens_per_tree",
        "Guessed tokens for a request that were right in a pass with guesses for it: they came beside its one token",
    )
    if trees:
        buckets = [(str(float(most)), float(sum(trees[: most + 1]))) for most in range(len(trees) - 1)]
        total = float(sum(trees))
        accepted = sum(number * count for number, count in enumerate(trees))
        histogram.add_metric([], [*buckets, ("+Inf", total)], accepted)
    return histogram
