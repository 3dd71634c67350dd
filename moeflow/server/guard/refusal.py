"""How a guard turns a request away: counted, noted for the request's log line, answered with an error object."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from moeflow.server.errors import ApiError
from moeflow.server.metrics import Metrics
from moeflow.server.request_log import record_of

Check = Callable[[Scope], ApiError | None]  # None: the request may pass


class Guard:
    """ASGI middleware: answers with the error that a check of the request's head returns, or hands the request on."""

    def __init__(self, app: ASGIApp, check: Check, metrics: Metrics) -> None:
        self._app = app
        self._check = check
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or pass it on."""
        error = self._check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._metrics.count_refusal(error)
        record_of(scope).error = error
        await error.response(scope)(scope, receive, send)
