"""Metrics of drafted tokens for Prometheus: by speculator, by depth, and by number of accepted tokens.

Labels are few: the server's speculators, and depths up to that of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeflow.core.engine_messages import SpeculatorStats
from moeflow.server.model_pool import ModelPool

_BY_DEPTH: tuple[tuple[str, str, Callable[[SpeculatorStats], list[int]]], ...] = (
    (
        "moeflow_speculator_drafted_tokens",
        "Drafted tokens that were computed, by who drafted (each of several who drafted the same) and how far ahead",
        lambda it: it.drafted_total,
    ),
    ("moeflow_speculator_accepted_tokens", "Of these, those that were right", lambda it: it.accepted_total),
)


class SpeculationCollector(Collector):
    """Reads snapshots when Prometheus asks. Without speculators there are no samples."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield counters over all replicas, and for each speculator whether it rests."""
        models = {model.name: model.stats() for model in self._models.named}
        for name, text, of_speculator in _BY_DEPTH:
            counter = CounterMetricFamily(name, text, labels=["model", "speculator", "depth"])
            for model, stats in models.items():
                for speculator in stats.speculators:
                    for depth, value in enumerate(of_speculator(speculator), start=1):
                        counter.add_metric([model, speculator.name, str(depth)], value)
            yield counter
        seconds = CounterMetricFamily(
            "moeflow_speculator_drafting_seconds", "Time spent drafting", labels=["model", "speculator"]
        )
        for model, stats in models.items():
            for speculator in stats.speculators:
                seconds.add_metric([model, speculator.name], speculator.drafting_s_total)
        yield seconds
        yield _accepted_at_once({model: stats.trees_total for model, stats in models.items()})
        yield self._resting()

    def _resting(self) -> Metric:
        resting = GaugeMetricFamily(
            "moeflow_speculator_resting",
            "1 if it does not draft now, because drafts do not pay or it has failed",
            labels=["model", "replica", "speculator"],
        )
        for model in self._models.named:
            for number, replica in enumerate(model.replicas()):
                for speculator in replica.stats.speculators:
                    resting.add_metric([model.name, str(number), speculator.name], speculator.is_resting)
        return resting


def _accepted_at_once(trees_of: Mapping[str, Sequence[int]]) -> HistogramMetricFamily:
    """Return the drafted tokens that a pass accepted for a request. Each list counts passes by that number from 0."""
    histogram = HistogramMetricFamily(
        "moeflow_accepted_tokens_per_tree",
        "Drafted tokens that a pass accepted for a request, in addition to its one token",
        labels=["model"],
    )
    for model, trees in trees_of.items():
        if trees:
            buckets = [(str(float(most)), float(sum(trees[: most + 1]))) for most in range(len(trees) - 1)]
            total = float(sum(trees))
            accepted = sum(number * count for number, count in enumerate(trees))
            histogram.add_metric([model], [*buckets, ("+Inf", total)], accepted)
    return histogram
