"""Reads metrics of models for Prometheus: the tables, the facts of loaded models, and accepted tokens by pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeflow.server.metric_tables import TABLES, stats_of
from moeflow.server.model_pool import ModelPool
from moeflow.server.served_model import ServedModel


class ModelCollector(Collector):
    """Reads the models' state when Prometheus asks, instead of copying it on every pass."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all tables, the accepted tokens, and the facts of each loaded model as labels."""
        facts = InfoMetricFamily("moeflow_model", "What is served")  # prometheus_client makes it moeflow_model_info
        for model in self._models.named:
            if model.generator is not None:
                facts.add_metric([], _facts(model))
        yield facts
        for table in TABLES:
            yield from table.collect(self._models)
        yield _accepted_at_once({labels: stats.trees_total for labels, stats in stats_of(self._models).items()})


def _facts(model: ServedModel) -> dict[str, str]:
    return {
        "model": model.info.name,
        "model_type": model.info.model_type,
        "weight_format": model.info.weight_format,
        "lossy_top_k": str(model.info.lossy_top_k),  # not 0: a predictor chooses experts
    }


def _accepted_at_once(trees_of: Mapping[tuple[str, ...], Sequence[int]]) -> HistogramMetricFamily:
    """Return the drafted tokens that a pass accepted for a request. Each list counts passes by that number from 0."""
    histogram = HistogramMetricFamily(
        "moeflow_accepted_tokens_per_tree",
        "Drafted tokens that a pass accepted for a request, in addition to its one token",
        labels=["model"],
    )
    for labels, trees in trees_of.items():
        if trees:
            buckets = [(str(float(most)), float(sum(trees[: most + 1]))) for most in range(len(trees) - 1)]
            total = float(sum(trees))
            accepted = sum(number * count for number, count in enumerate(trees))
            histogram.add_metric(labels, [*buckets, ("+Inf", total)], accepted)
    return histogram
