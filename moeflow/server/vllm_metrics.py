"""The numbers that vLLM has, too, under vLLM's names, so that its dashboards and autoscalers work.

Names with another meaning in vLLM are left out. A model counts as one engine, `engine="0"`, with all its replicas.

Source: vllm/v1/metrics/loggers.py and docs/design/metrics.md of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeflow.core.engine_messages import EngineStats
from moeflow.server.generation_metrics import GenerationMetrics
from moeflow.server.metric_tables import MetricTable, kv_usage, stats_of
from moeflow.server.model_pool import ModelPool


def _num_prompt_tokens(stats: EngineStats) -> int:
    return stats.prompt_tokens_total + stats.prefix_hit_tokens_total


_TABLE: Final = MetricTable(
    ("model_name", "engine"),
    lambda models: {(*labels, "0"): stats for labels, stats in stats_of(models).items()},
    gauges=(
        ("vllm:num_requests_running", "As moeflow_requests_running", "num_running"),
        ("vllm:num_requests_waiting", "As moeflow_requests_waiting", "num_waiting"),
        ("vllm:kv_cache_usage_perc", "As moeflow_kv_usage_ratio: 1 is full", kv_usage),
    ),
    counters=(
        ("vllm:num_preemptions", "As moeflow_preemptions_total", "preemptions_total"),
        ("vllm:generation_tokens", "As moeflow_generated_tokens_total", "generated_tokens_total"),
        ("vllm:prompt_tokens", "Prompt tokens, computed or found in the prefix tree", _num_prompt_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix tree", _num_prompt_tokens),
        ("vllm:prefix_cache_hits", "As moeflow_prefix_hit_tokens_total", "prefix_hit_tokens_total"),
    ),
)
_REASONS = {"cancelled": "abort"}  # with another name there


class VllmCollector(Collector):
    """Reads the other metrics when Prometheus asks."""

    def __init__(self, models: ModelPool, generation: GenerationMetrics) -> None:
        self._models = models
        self._generation = generation
        self._histograms = {
            "vllm:time_to_first_token_seconds": generation.time_to_first_token,
            "vllm:inter_token_latency_seconds": generation.inter_token_latency,
            "vllm:request_time_per_output_token_seconds": generation.time_per_output_token,
            "vllm:e2e_request_latency_seconds": generation.request_duration,
            "vllm:request_queue_time_seconds": generation.queue_time,
            "vllm:request_prompt_tokens": generation.prompt_tokens,
            "vllm:request_generation_tokens": generation.generation_tokens,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics under their other names."""
        yield from _TABLE.collect(self._models)
        yield _renamed(self._generation.finished, "vllm:request_success")
        for name, histogram in self._histograms.items():
            yield _renamed(histogram, name)


def _renamed(metric: Counter | Histogram, name: str) -> Metric:
    """Return a metric with its samples under another name, and with vLLM's labels."""
    (own,) = metric.collect()
    other = Metric(name, f"As {own.name}", own.type)
    for sample in own.samples:
        labels = dict(sample.labels)
        given = {"model_name": labels.pop("model"), "engine": "0"}
        if (reason := labels.pop("reason", None)) is not None:
            given["finished_reason"] = _REASONS.get(reason, reason)
        other.add_sample(sample.name.replace(own.name, name, 1), given | labels, sample.value)
    return other
