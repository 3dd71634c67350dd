"""Numbers for Prometheus: what the engine counted, and the times that only the API side can see.

Every application has its own registry, so that several can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moeflow.core.engine_messages import EngineStats, LenderStats
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.server.build import BuildCollector
from moeflow.server.errors import ApiError
from moeflow.server.generation_metrics import GenerationMetrics
from moeflow.server.model_metrics import ModelCollector, kv_usage
from moeflow.server.model_pool import ModelPool
from moeflow.server.request_metrics import RequestMetrics
from moeflow.server.speculation_metrics import SpeculationCollector
from moeflow.server.vllm_metrics import VllmCollector

_GAUGES: tuple[tuple[str, str, str], ...] = (  # (name, help, field of EngineStats)
    ("moeflow_requests_waiting", "Sequences in the engine's queue", "num_waiting"),
    ("moeflow_requests_running", "Sequences that take part in passes", "num_running"),
    ("moeflow_batch_requests_waiting", "Of these in the queue, those of batch jobs", "num_batch_waiting"),
    ("moeflow_batch_requests_running", "Sequences of batch jobs that have begun", "num_batch_running"),
    ("moeflow_tokens_per_second", "Tokens generated per second, over the last few seconds", "tokens_per_second"),
    ("moeflow_kv_blocks", "KV blocks in the pool", "kv_blocks_total"),
    ("moeflow_kv_blocks_cached", "KV blocks that only the prefix tree holds: free on demand", "kv_blocks_cached"),
    (
        "moeflow_prompt_cache_bytes",
        "Keys and values of prompts on disk, of all that share the folder",
        "prompt_cache_bytes",
    ),
    (
        "moeflow_prompt_cache_writing",
        "1 if prompts are written to disk: 0 without --prompt-cache, or if the disk refuses",
        "is_prompt_cache_writing",
    ),
    ("moeflow_memory_limit_bytes", "Memory that the user allows for everything; 0: no limit", "memory_limit_bytes"),
    ("moeflow_expert_slots", "Room in memory for experts that come from disk; 0: all are resident", "expert_slots"),
    ("moeflow_experts_in_slots", "Experts from disk that are in memory", "experts_in_slots"),
    ("moeflow_experts_remote", "Experts that other machines have in their memory", "experts_remote"),
    (
        "moeflow_engine_stalled",
        "1 if the engine's process does not run, or a pass of it does not end",
        "is_engine_stalled",
    ),
    ("moeflow_expert_prefetching", "1 if experts are read ahead now", "is_prefetching"),
    (
        "moeflow_rank_imbalance",
        "Tokens of the rank that has most over the mean, the mean of layers; 0: not known, or no whole experts",
        "rank_imbalance",
    ),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (  # prometheus_client appends _total
    (
        "moeflow_engine_restarts",
        "Times that an engine was started in the place of one that died",
        "engine_restarts_total",
    ),
    ("moeflow_generated_tokens", "Tokens generated", "generated_tokens_total"),
    ("moeflow_prompt_tokens", "Prompt tokens computed", "prompt_tokens_total"),
    ("moeflow_prefix_hit_tokens", "Prompt tokens that the prefix tree saved", "prefix_hit_tokens_total"),
    (
        "moeflow_prompt_cache_hit_tokens",
        "Tokens whose keys and values were read from disk",
        "prompt_cache_hit_tokens_total",
    ),
    ("moeflow_prompt_cache_read_bytes", "Bytes of these", "prompt_cache_read_bytes_total"),
    ("moeflow_prompt_cache_written_bytes", "Bytes of prompts written to disk", "prompt_cache_written_bytes_total"),
    ("moeflow_requests_finished", "Sequences that ended by themselves", "requests_finished_total"),
    (
        "moeflow_requests_cancelled",
        "Sequences cancelled: the client left, or a stop string was met",
        "requests_cancelled_total",
    ),
    ("moeflow_speculated_passes", "Passes with drafts of what comes next", "speculated_passes_total"),
    ("moeflow_drafted_tokens", "Drafted tokens that were computed", "drafted_tokens_total"),
    ("moeflow_accepted_tokens", "Drafted tokens that were right", "accepted_tokens_total"),
    ("moeflow_drafting_seconds", "Time that drafting took", "drafting_s_total"),
    ("moeflow_preemptions", "Times a running sequence gave up its KV blocks", "preemptions_total"),
    ("moeflow_passes", "Forward passes", "passes_total"),
    ("moeflow_failed_passes", "Forward passes that failed", "failed_passes_total"),
    ("moeflow_expert_hits", "Experts from disk that were in memory when a pass needed them", "expert_hits_total"),
    ("moeflow_expert_late", "Experts that were on their way when a pass needed them", "expert_late_total"),
    ("moeflow_expert_misses", "Experts that were not in memory when a pass needed them", "expert_misses_total"),
    ("moeflow_expert_stall_seconds", "Time that passes waited for experts", "expert_stall_s_total"),
    ("moeflow_expert_demand_bytes", "Bytes of experts read because a pass needed them", "expert_demand_bytes_total"),
    ("moeflow_expert_prefetched_bytes", "Bytes of experts read ahead", "expert_prefetched_bytes_total"),
    ("moeflow_expert_used_bytes", "Bytes of experts read ahead and needed later", "expert_used_bytes_total"),
    ("moeflow_expert_wasted_bytes", "Bytes of experts read ahead in vain", "expert_wasted_bytes_total"),
    ("moeflow_remote_pairs", "Pairs of token and expert that other machines computed", "remote_pairs_total"),
    ("moeflow_remote_bytes", "Bytes of rows and results of these", "remote_bytes_total"),
    ("moeflow_remote_wait_seconds", "Time that passes waited for other machines' experts", "remote_wait_s_total"),
    ("moeflow_expert_moves", "Experts that went to another rank, got a replica there or lost it", "expert_moves_total"),
)

_REPLICA_GAUGES: tuple[
    tuple[str, str, Callable[[ReplicaStatus], float]], ...
] = (  # with the labels "model" and "replica"
    ("moeflow_replica_ready", "1 if this engine computes", lambda it: it.state is EngineState.READY),
    ("moeflow_replica_slow", "1 if it is so slow that others get the new sequences", lambda it: it.is_slow),
    ("moeflow_replica_requests_waiting", "Sequences in its own queue", lambda it: it.stats.num_waiting),
    ("moeflow_replica_requests_running", "Sequences in its passes", lambda it: it.stats.num_running),
    ("moeflow_replica_tokens_per_second", "Tokens it generates per second", lambda it: it.stats.tokens_per_second),
    ("moeflow_replica_kv_usage_ratio", "Share of its KV blocks in use", lambda it: kv_usage(it.stats)),
    ("moeflow_replica_peers", "Other replicas that compute their experts for it now", lambda it: it.stats.num_peers),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("moeflow_replica_generated_tokens", "Tokens it has generated", "generated_tokens_total"),
    ("moeflow_replica_restarts", "Times that it was started in the place of one that died", "engine_restarts_total"),
    ("moeflow_replica_peer_rows_sent", "Rows it has sent to other replicas' experts", "peer_rows_sent_total"),
    ("moeflow_replica_peer_wait_seconds", "Time that its passes waited for these", "peer_wait_s_total"),
    (
        "moeflow_replica_peer_pairs_served",
        "Pairs of a token and an expert that it has computed for other replicas",
        "peer_pairs_served_total",
    ),
    ("moeflow_replica_peer_serve_seconds", "Time in which it computed these", "peer_serve_s_total"),
    (
        "moeflow_replica_peer_pairs_taken_over",
        "Pairs it has computed because the replica that has the expert was not there",
        "peer_pairs_taken_over_total",
    ),
)
_RANK_GAUGES: tuple[tuple[str, str, str], ...] = (  # and "rank"
    ("moeflow_rank_layers", "Layers that it has a part of", "num_layers"),
    ("moeflow_rank_slow", "Whether the other ranks wait for it most of the time", "is_slow"),
    ("moeflow_rank_experts", "Whole experts that it has, of all layers", "num_experts"),
    ("moeflow_rank_tokens_per_pass", "Tokens that its experts get, the mean of layers", "tokens_per_pass"),
)
_RANK_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("moeflow_rank_busy_seconds", "Time that it has spent computing passes", "busy_s_total"),
    ("moeflow_rank_waited_seconds", "Time that it has spent in exchanges with other ranks", "waited_s_total"),
)
_LENDER_GAUGES: tuple[tuple[str, str, Callable[[LenderStats], float]], ...] = (  # and "lender"
    ("moeflow_lender_connected", "1 if this machine lends its memory now", lambda it: it.state == "connected"),
    ("moeflow_lender_experts", "Experts that it has", lambda it: it.num_experts),
)


class Metrics:
    """The registry and everything in it. Metrics of a model have the label `model`."""

    def __init__(self, models: ModelPool) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(BuildCollector())
        self._registry.register(ModelCollector(models))
        self._registry.register(_EngineCollector(models))
        self._registry.register(_ReplicaCollector(models))
        self._registry.register(SpeculationCollector(models))
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
        """Return all metrics in Prometheus' text format, without the times at which counters were made."""
        return generate_latest(_WithoutCreated(self._registry))


class _WithoutCreated(CollectorRegistry):
    """A registry without its `_created` samples, which double the number of series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._all = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for metric in self._all.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _EngineCollector(Collector):
    """Reads the engines' snapshots when Prometheus asks, instead of copying them on every pass."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that engines count."""
        models = {model.name: model.stats() for model in self._models.named}
        for name, text, field in _GAUGES:
            yield _of_models(GaugeMetricFamily(name, text, labels=["model"]), field, models)
        for name, text, field in _COUNTERS:
            yield _of_models(CounterMetricFamily(name, text, labels=["model"]), field, models)


class _ReplicaCollector(Collector):
    """Likewise, for each replica."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have labels for model and replica."""
        replicas = {
            (model.name, str(number)): replica
            for model in self._models.named
            for number, replica in enumerate(model.replicas())
        }
        labels = ["model", "replica"]
        for name, text, value in _REPLICA_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for of_replica, replica in replicas.items():
                gauge.add_metric(of_replica, value(replica))
            yield gauge
        for name, text, field in _REPLICA_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for of_replica, replica in replicas.items():
                counter.add_metric(of_replica, getattr(replica.stats, field))
            yield counter
        for name, text, field in _RANK_GAUGES:
            yield _of_ranks(GaugeMetricFamily(name, text, labels=[*labels, "rank"]), field, replicas)
        for name, text, field in _RANK_COUNTERS:
            yield _of_ranks(CounterMetricFamily(name, text, labels=[*labels, "rank"]), field, replicas)
        for name, text, of_lender in _LENDER_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=[*labels, "lender"])
            for of_replica, replica in replicas.items():
                for lender in replica.stats.lenders:
                    gauge.add_metric([*of_replica, lender.address], of_lender(lender))
            yield gauge


def _of_models(
    metric: GaugeMetricFamily | CounterMetricFamily, field: str, models: Mapping[str, EngineStats]
) -> Metric:
    """Return a metric with the values of all models."""
    for name, stats in models.items():
        metric.add_metric([name], getattr(stats, field))
    return metric


def _of_ranks(
    metric: GaugeMetricFamily | CounterMetricFamily, field: str, replicas: Mapping[tuple[str, str], ReplicaStatus]
) -> Metric:
    """Return a metric with the values of all ranks of all replicas."""
    for of_replica, replica in replicas.items():
        for rank, stats in enumerate(replica.stats.ranks):
            metric.add_metric([*of_replica, str(rank)], getattr(stats, field))
    return metric
