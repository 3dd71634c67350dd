"""Numbers for Prometheus: what the engine counted, and the times that only the API side can see.

Every application has its own registry, so that several can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

from moeflow.server.build import BuildCollector
from moeflow.server.errors import ApiError
from moeflow.server.generation_metrics import GenerationMetrics
from moeflow.server.metric_sums import Count, MetricSums, counts_of
from moeflow.server.model_metrics import ModelCollector
from moeflow.server.model_pool import ModelPool
from moeflow.server.request_metrics import RequestMetrics
from moeflow.server.vllm_metrics import VllmCollector


class Metrics:
    """The registry and everything in it. Metrics of a model have the label `model`."""

    def __init__(self, models: ModelPool) -> None:
        self.others = MetricSums()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(BuildCollector())
        self._registry.register(ModelCollector(models))
        self.requests = RequestMetrics(self._registry)
        self.generation = GenerationMetrics(self._registry)
        self._registry.register(VllmCollector(models, self.generation))
        self._refused = Counter(
            "moeflow_requests_rejected",
            "Requests answered with an error object instead of a result, by the error's code",
            ["reason"],
            registry=self._registry,
        )

    def count_refusal(self, error: ApiError) -> None:
        """Count one refused request under its code."""
        self._refused.labels(error.code).inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, without the times at which counters were made.

        Counts of the server's other processes are added.
        """
        return generate_latest(_Shown(self._registry, self.others))

    def counts(self) -> list[Count]:
        """Return all that this process has counted."""
        return counts_of(self._registry.collect())


class _Shown(CollectorRegistry):
    """A registry with others' counts, and without its `_created` samples, which double the number of series."""

    def __init__(self, registry: CollectorRegistry, others: MetricSums) -> None:
        super().__init__()
        self._all = registry
        self._others = others

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for metric in self._others.added_to(self._all.collect()):
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
