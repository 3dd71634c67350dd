"""Numbers for Prometheus of generated sequences: times, lengths and ends, by model.

Times are those of interactive requests; lengths and ends also count batch jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from moeflow.core.request import FinishReason

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # to 500,000


class OfModel(NamedTuple):
    """Where the numbers of one model go."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    request_duration: Histogram
    queue_time: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    failed: Counter


class GenerationMetrics:
    """The histograms and counters, each with the label `model`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ["model"], buckets=buckets, registry=registry)

        self.time_to_first_token = histogram(
            "moeflow_time_to_first_token_seconds",
            "From a request's arrival to a sequence's first token",
            _LATENCY_BUCKETS_S,
        )
        self.inter_token_latency = histogram(
            "moeflow_inter_token_latency_seconds", "Each pause between two outputs of a sequence", _PER_TOKEN_BUCKETS_S
        )
        self.time_per_output_token = histogram(
            "moeflow_time_per_output_token_seconds",
            "Mean time between the tokens of a finished sequence",
            _PER_TOKEN_BUCKETS_S,
        )
        self.request_duration = histogram(
            "moeflow_request_duration_seconds", "From a request's arrival to its last token", _DURATION_BUCKETS_S
        )
        self.queue_time = histogram(
            "moeflow_queue_time_seconds",
            "From a sequence's arrival at the engine to its first pass",
            _DURATION_BUCKETS_S,
        )
        self.prompt_tokens = histogram(
            "moeflow_sequence_prompt_tokens", "Tokens of a finished sequence's prompt", _TOKEN_BUCKETS
        )
        self.generation_tokens = histogram(
            "moeflow_sequence_generated_tokens", "Tokens generated for a finished sequence", _TOKEN_BUCKETS
        )
        self.finished = Counter(
            "moeflow_sequences_finished",
            "Sequences by their finish reason: stop, length, cancelled or error",
            ["model", "reason"],
            registry=registry,
        )
        self.failed = Counter(
            "moeflow_requests_failed",
            "Requests, streamed or not, that failed after work had begun",
            ["model"],
            registry=registry,
        )

    def of(self, model: str) -> OfModel:
        """Return where the numbers of a model go; from then on each is shown, from zero."""
        for reason in FinishReason:
            self.finished.labels(model, reason)
        return OfModel(
            self.time_to_first_token.labels(model),
            self.inter_token_latency.labels(model),
            self.time_per_output_token.labels(model),
            self.request_duration.labels(model),
            self.queue_time.labels(model),
            self.prompt_tokens.labels(model),
            self.generation_tokens.labels(model),
            self.failed.labels(model),
        )
