"""Numbers for Prometheus of HTTP requests that are over: by endpoint and status, and by the key that sent them.

Labels are few: endpoints are those of the API, keys those of the server. Any other path is `other`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from moeflow.server.request_log import CLIENT_CLOSED_REQUEST, RequestRecord

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class RequestMetrics:
    """Counts requests as they end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._http = Counter(
            "moeflow_http_requests",
            "HTTP requests that are over, by endpoint, method and status; 499: the client left before an answer",
            ["endpoint", "method", "status"],
            registry=registry,
        )
        self._by_key = Counter("moeflow_key_requests", "Requests with this key", ["key"], registry=registry)
        self._limited = Counter(
            "moeflow_key_requests_limited", "Of these, those refused because of its limits", ["key"], registry=registry
        )
        self._tokens = Counter(
            "moeflow_key_tokens",
            "Tokens of requests with this key, by kind: prompt or completion",
            ["key", "kind"],
            registry=registry,
        )

    def show_keys(self, names: Iterable[str]) -> None:
        """Begin to count the requests of these keys, from zero."""
        for name in names:
            self._by_key.labels(name)
            self._limited.labels(name)
            for kind in ("prompt", "completion"):
                self._tokens.labels(name, kind)

    def note(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        method = record.method if record.method in _METHODS else "other"
        self._http.labels(record.endpoint, method, str(record.status or CLIENT_CLOSED_REQUEST)).inc()
        if record.account is None:
            return
        name = record.account.name
        self._by_key.labels(name).inc()
        if record.error is not None and record.error.code == "rate_limit_exceeded":
            self._limited.labels(name).inc()
        if record.work is not None:
            self._tokens.labels(name, "prompt").inc(record.work.num_prompt_tokens)
            self._tokens.labels(name, "completion").inc(record.work.num_completion_tokens)
