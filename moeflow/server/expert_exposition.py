"""What engines have counted of their experts, in Prometheus' text format.

These numbers are no part of `/metrics`: a scrape of that would make engines count for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moeflow.core.observation import ExpertSight
from moeflow.server.expert_sums import sum_of_tokens, sums_of_places, table_of


def exposition(model: str, sights: Sequence[ExpertSight]) -> bytes:
    """Return the sums over the engines of a model."""
    registry = CollectorRegistry()
    registry.register(_Once([_tokens(model, sights), _loads(model, sights)]))
    return generate_latest(registry)


class _Once(Collector):
    """Gives metrics that are made already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield from self._metrics


def _tokens(model: str, sights: Sequence[ExpertSight]) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "moeflow_expert_tokens",
        "Tokens that chose an expert, since the engine began to observe",
        labels=("model", "layer", "expert"),
    )
    first = sights[0]
    table = table_of(sum_of_tokens([sight.total for sight in sights]).counts, first)
    if table is not None:
        for place, (layer, row) in enumerate(zip(first.layers, table.tolist(), strict=True)):
            name = f"encoder {layer}" if place < first.num_encoder_layers else str(layer)
            for expert, number in enumerate(row):
                family.add_metric((model, name, str(expert)), number)
    return family


def _loads(model: str, sights: Sequence[ExpertSight]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "moeflow_expert_load",
        "Tokens of an expert in one pass over the mean of its layer, for passes with a mean of one token or more",
        labels=("model",),
    )
    loads = sums_of_places([sight.loads for sight in sights])
    bounds = [*map(str, sights[0].load_bounds), "+Inf"]
    number = sum(loads)
    # The loads of a layer have a mean of 1.
    family.add_metric((model,), list(zip(bounds, accumulate(loads), strict=True)), sum_value=number)
    return family
