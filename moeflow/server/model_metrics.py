"""Metrics of each served model for Prometheus: whether it is loaded, its memory, and its activity."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeflow.core.engine_messages import EngineStats
from moeflow.server.model_pool import ModelPool
from moeflow.server.served_model import ServedModel

_GAUGES: tuple[tuple[str, str, Callable[[ServedModel], float]], ...] = (
    ("moeflow_model_loaded", "1 if the model is loaded", lambda it: it.generator is not None),
    ("moeflow_model_memory_bytes", "Memory that it was planned to hold; 0: not loaded", lambda it: it.memory_bytes),
    ("moeflow_kv_usage_ratio", "Share of KV blocks that running sequences hold", lambda it: kv_usage(it.stats())),
    (
        "moeflow_sequences_unfinished",
        "Sequences admitted and not finished, as the queue bound counts them",
        lambda it: it.admission.num_unfinished,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ServedModel], float]], ...] = (  # prometheus_client appends _total
    ("moeflow_model_loads", "Times it was loaded because a request asked for it", lambda it: it.num_loads),
    ("moeflow_model_failed_loads", "Times it could not be loaded", lambda it: it.num_failed_loads),
    ("moeflow_model_load_seconds", "Time these loads took, waits for memory included", lambda it: it.load_s_total),
)


class ModelCollector(Collector):
    """Reads the models' state when Prometheus asks."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a label for the model, and of each that is loaded its facts as labels."""
        models = self._models.named
        facts = InfoMetricFamily("moeflow_model", "What is served")  # prometheus_client makes it moeflow_model_info
        for model in models:
            if model.generator is not None:
                facts.add_metric([], _facts(model))
        yield facts
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model in models:
                gauge.add_metric([model.name], value(model))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model in models:
                counter.add_metric([model.name], value(model))
            yield counter


def _facts(model: ServedModel) -> dict[str, str]:
    return {
        "model": model.info.name,
        "model_type": model.info.model_type,
        "weight_format": model.info.weight_format,
        "lossy_top_k": str(model.info.lossy_top_k),  # not 0: a predictor chooses an encoder's experts
    }


def kv_usage(stats: EngineStats) -> float:
    """Return the share of KV blocks held by running sequences, 0 to 1."""
    return stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
