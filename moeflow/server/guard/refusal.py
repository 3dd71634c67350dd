"""How a guard turns a request away: counted, noted for the request's log line, answered with an error object."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from moeflow.server.errors import ApiError
from moeflow.server.metrics import Metrics
from moeflow.server.request_log import record_of


async def refuse(error: ApiError, metrics: Metrics, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error."""
    metrics.count_refusal(error)
    record_of(scope).error_code = error.code
    await error.response()(scope, receive, send)
