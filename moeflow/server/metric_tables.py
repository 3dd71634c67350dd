"""Metrics of models, engines, replicas, ranks, lenders and speculators: a table for each set of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from moeflow.core.engine_messages import EngineStats, LenderStats, RankStats, SpeculatorStats
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.server.model_pool import ModelPool
from moeflow.server.served_model import ServedModel

Rows = tuple[tuple[str, str, str | Callable[[Any], float]], ...]  # name, help, and an attribute or a function of it


@dataclass(frozen=True, slots=True)
class MetricTable:
    """Metrics with the same labels, read from the same objects."""

    labels: tuple[str, ...]
    sources: Callable[[ModelPool], Mapping[tuple[str, ...], Any]]  # by values of the labels
    gauges: Rows = ()
    counters: Rows = ()  # prometheus_client appends _total

    def collect(self, models: ModelPool) -> Iterator[Metric]:
        """Yield a family for each row, with a sample for each source."""
        sources = self.sources(models)
        for kind, rows in ((GaugeMetricFamily, self.gauges), (CounterMetricFamily, self.counters)):
            for name, text, value in rows:
                family = kind(name, text, labels=self.labels)
                read = attrgetter(value) if isinstance(value, str) else value
                for labels, source in sources.items():
                    family.add_metric(labels, read(source))
                yield family


def kv_usage(stats: EngineStats) -> float:
    """Return the share of KV blocks held by running sequences, 0 to 1."""
    return stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


def stats_of(models: ModelPool) -> dict[tuple[str, ...], EngineStats]:
    """Return the statistics of each model, over its replicas."""
    return {(model.name,): model.stats() for model in models.named}


def _models_of(models: ModelPool) -> dict[tuple[str, ...], ServedModel]:
    return {(model.name,): model for model in models.named}


def _replicas_of(models: ModelPool) -> dict[tuple[str, ...], ReplicaStatus]:
    """Return each replica, with its machine among the labels. An empty label stands for the server's machine."""
    return {
        (model.name, str(i), replica.host): replica
        for model in models.named
        for i, replica in enumerate(model.replicas())
    }


def _ranks_of(models: ModelPool) -> dict[tuple[str, ...], RankStats]:
    return {
        (model, number, stats.host or host, str(rank)): stats
        for (model, number, host), replica in _replicas_of(models).items()
        for rank, stats in enumerate(replica.stats.ranks)
    }


def _lenders_of(models: ModelPool) -> dict[tuple[str, ...], LenderStats]:
    replicas = _replicas_of(models).items()
    return {(*labels, each.address): each for labels, replica in replicas for each in replica.stats.lenders}


def _resting_of(models: ModelPool) -> dict[tuple[str, ...], SpeculatorStats]:
    replicas = _replicas_of(models).items()
    return {(*labels, each.name): each for labels, replica in replicas for each in replica.stats.speculators}


def _speculators_of(models: ModelPool) -> dict[tuple[str, ...], SpeculatorStats]:
    return {(*labels, each.name): each for labels, stats in stats_of(models).items() for each in stats.speculators}


def _depths_of(models: ModelPool) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return drafted and accepted tokens by depth, from 1 on."""
    return {
        (*labels, str(depth)): counts
        for labels, each in _speculators_of(models).items()
        for depth, counts in enumerate(zip(each.drafted_total, each.accepted_total, strict=True), start=1)
    }


_MODEL_GAUGES: Final[Rows] = (
    ("moeflow_model_loaded", "1 if the model is loaded", lambda it: it.generator is not None),
    ("moeflow_model_memory_bytes", "Memory that it was planned to hold; 0: not loaded", "memory_bytes"),
    ("moeflow_kv_usage_ratio", "Share of KV blocks that running sequences hold", lambda it: kv_usage(it.stats())),
    (
        "moeflow_sequences_unfinished",
        "Sequences admitted and not finished, as the queue bound counts them",
        "admission.num_unfinished",
    ),
)
_MODEL_COUNTERS: Final[Rows] = (
    ("moeflow_model_loads", "Times it was loaded because a request asked for it", "num_loads"),
    ("moeflow_model_failed_loads", "Times it could not be loaded", "num_failed_loads"),
    ("moeflow_model_load_seconds", "Time these loads took, waits for memory included", "load_s_total"),
)
_ENGINE_GAUGES: Final[Rows] = (
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
_ENGINE_COUNTERS: Final[Rows] = (
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
    ("moeflow_gpu_hits", "Experts that were on the GPU when a pass needed them", "gpu_hits_total"),
    ("moeflow_expert_hits", "Experts that were in main memory when a pass needed them", "expert_hits_total"),
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
    ("moeflow_expert_moves", "Experts that changed their rank, or came to the GPU", "expert_moves_total"),
    ("moeflow_expert_choices", "Choices of experts in passes with a capacity", "expert_choices_total"),
    ("moeflow_dropped_choices", "Choices of experts dropped beyond their capacity", "dropped_choices_total"),
    ("moeflow_gpu_pairs", "Pairs of token and expert that the GPU computed, beside the CPU", "gpu_pairs_total"),
    ("moeflow_cpu_pairs", "Pairs of token and expert that the CPU computed, beside the GPU", "cpu_pairs_total"),
    ("moeflow_cpu_experts_seconds", "Time in which the CPU computed these", "cpu_experts_s_total"),
    ("moeflow_cpu_wait_seconds", "Time in which the CPU waited for the GPU", "cpu_wait_s_total"),
    ("moeflow_streamed_passes", "Passes whose experts were copied to the GPU", "streamed_passes_total"),
)
_REPLICA_GAUGES: Final[Rows] = (
    ("moeflow_replica_ready", "1 if this engine computes", lambda it: it.state is EngineState.READY),
    ("moeflow_replica_slow", "1 if it is so slow that others get the new sequences", "is_slow"),
    ("moeflow_replica_requests_waiting", "Sequences in its own queue", "stats.num_waiting"),
    ("moeflow_replica_requests_running", "Sequences in its passes", "stats.num_running"),
    ("moeflow_replica_tokens_per_second", "Tokens it generates per second", "stats.tokens_per_second"),
    ("moeflow_replica_kv_usage_ratio", "Share of its KV blocks in use", lambda it: kv_usage(it.stats)),
)
_REPLICA_COUNTERS: Final[Rows] = (
    ("moeflow_replica_generated_tokens", "Tokens it has generated", "stats.generated_tokens_total"),
    (
        "moeflow_replica_restarts",
        "Times that it was started in the place of one that died",
        "stats.engine_restarts_total",
    ),
)
_RANK_GAUGES: Final[Rows] = (
    ("moeflow_rank_layers", "Layers that it has a part of", "num_layers"),
    ("moeflow_rank_slow", "Whether the other ranks wait for it most of the time", "is_slow"),
    ("moeflow_rank_experts", "Whole experts that it has, of all layers", "num_experts"),
    ("moeflow_rank_tokens_per_pass", "Tokens that its experts get, the mean of layers", "tokens_per_pass"),
)
_RANK_COUNTERS: Final[Rows] = (
    ("moeflow_rank_busy_seconds", "Time that it has spent computing passes", "busy_s_total"),
    ("moeflow_rank_waited_seconds", "Time that it has spent in exchanges with other ranks", "waited_s_total"),
)
_LENDER_GAUGES: Final[Rows] = (
    ("moeflow_lender_connected", "1 if this machine lends its memory now", lambda it: it.state == "connected"),
    ("moeflow_lender_experts", "Experts that it has", "num_experts"),
)
_DEPTH_COUNTERS: Final[Rows] = (
    (
        "moeflow_speculator_drafted_tokens",
        "Drafted tokens that were computed, by who drafted (each of several who drafted the same) and how far ahead",
        itemgetter(0),
    ),
    ("moeflow_speculator_accepted_tokens", "Of these, those that were right", itemgetter(1)),
)
_SPECULATOR_COUNTERS: Final[Rows] = (
    ("moeflow_speculator_drafting_seconds", "Time spent drafting", "drafting_s_total"),
)
_SPECULATOR_GAUGES: Final[Rows] = (
    (
        "moeflow_speculator_resting",
        "1 if it does not draft now, because drafts do not pay or it has failed",
        "is_resting",
    ),
)
TABLES: Final = (
    MetricTable(("model",), _models_of, _MODEL_GAUGES, _MODEL_COUNTERS),
    MetricTable(("model",), stats_of, _ENGINE_GAUGES, _ENGINE_COUNTERS),
    MetricTable(("model", "replica", "host"), _replicas_of, _REPLICA_GAUGES, _REPLICA_COUNTERS),
    MetricTable(("model", "replica", "host", "rank"), _ranks_of, _RANK_GAUGES, _RANK_COUNTERS),
    MetricTable(("model", "replica", "host", "lender"), _lenders_of, _LENDER_GAUGES),
    MetricTable(("model", "replica", "host", "speculator"), _resting_of, _SPECULATOR_GAUGES),
    MetricTable(("model", "speculator"), _speculators_of, counters=_SPECULATOR_COUNTERS),
    MetricTable(("model", "speculator", "depth"), _depths_of, counters=_DEPTH_COUNTERS),
)
