"""Traces of requests for a collector of OpenTelemetry: a span a request, with what the engine did for it within.

Spans are made when a request is over, of the times in its record, so that a request under way costs nothing more. Names
are those of OpenTelemetry's conventions for generative AI. Texts of prompts and answers are never in them. Sending is
done in a thread of the SDK's; a collector that is away loses spans and holds up nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moeflow.server.request_log import GeneratedWork, RequestRecord

Attributes = dict[str, str | int | float | list[str]]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}


class RequestTracer:
    """Sends a trace of each reported request. Close it, so that the last ones are sent, too."""

    def __init__(self, endpoint: str | None = None) -> None:
        """`endpoint` is the base address of a collector; None: where OpenTelemetry's variables say."""
        own = Resource({"service.name": "moeflow"})
        address = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
        self._tracer = self._provider.get_tracer("moeflow")
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, record: RequestRecord) -> None:
        """Send the spans of a request that has just ended, and note in the record which trace they belong to.

        Probes and the page's files have none.
        """
        if record.level == logging.DEBUG:
            return
        to_ns = _wall_clock()
        operation, work = _OPERATIONS.get(record.path.partition("?")[0]), record.work
        name = f"{operation} {work.model_name}" if operation and work else f"{record.method} {record.path}"
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(record.trace_headers, Context()),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, operation),
            start_time=to_ns(record.started_s),
        )
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
        if (record.status or 0) >= 500 or (work and work.failure):
            span.set_status(Status(StatusCode.ERROR, record.end))
        for phase, begin_s, end_s in _phases(record):
            context = set_span_in_context(span, Context())
            child = self._tracer.start_span(phase, context=context, start_time=to_ns(begin_s))
            child.end(to_ns(end_s))
        span.end(to_ns(time.monotonic()))

    def close(self) -> None:
        """Send the remaining traces and end. Blocks: for some seconds at most, if the collector does not answer."""
        self._provider.shutdown()


def _wall_clock() -> Callable[[float], int]:
    """Return what makes nanoseconds since 1970 of a time of time.monotonic."""
    now_s, now_ns = time.monotonic(), time.time_ns()
    return lambda at_s: now_ns - round((now_s - at_s) * 1e9)


def _attributes(record: RequestRecord, operation: str | None) -> Attributes:
    found: Attributes = {
        "http.request.method": record.method,
        "url.path": record.path.partition("?")[0],
        "moeflow.request.id": record.request_id,
    }
    if record.status is not None:
        found["http.response.status_code"] = record.status
    if record.client is not None:
        found["client.address"] = record.client
    if record.error or record.end == "disconnected" or (record.work and record.work.failure):
        found["error.type"] = record.end
    if operation is not None:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "moeflow"}
    if record.work is not None:
        found |= _usage(record.work)
    return found


def _usage(work: GeneratedWork) -> Attributes:
    return {
        "gen_ai.request.model": work.model_name,
        "gen_ai.response.model": work.model_name,
        "gen_ai.usage.input_tokens": work.num_prompt_tokens,
        "gen_ai.usage.output_tokens": work.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": work.num_cached_tokens,
        "gen_ai.response.finish_reasons": [str(reason) for reason in work.finish_reasons],
    }


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Return (name, begin, end) of what a request went through in the engine, as far as it came."""
    work = record.work
    if work is None or work.begun_at_s is None or work.queued_s is None:
        return []
    joined_s, first_s, last_s = work.begun_at_s + work.queued_s, work.first_token_at_s, work.last_token_at_s
    if first_s is None or last_s is None:
        return [("queue", work.begun_at_s, joined_s)]
    joined_s = min(joined_s, first_s)
    return [("queue", work.begun_at_s, joined_s), ("prefill", joined_s, first_s), ("decode", first_s, last_s)]
