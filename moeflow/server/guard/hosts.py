"""Keeps web pages elsewhere from reaching a loopback server through a name of their own (DNS rebinding).

Such a request carries the attacker's name in its Host header; ours carry loopback's.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moeflow.server.config import ServerConfig, is_loopback_name
from moeflow.server.errors import ApiError
from moeflow.server.guard.refusal import refuse
from moeflow.server.metrics import Metrics


class HostGuard:
    """ASGI middleware: answers 403 to requests for a host name that is not ours."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._names = {name.lower() for name in (config.host, *config.allowed_hosts)}
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or hand on."""
        if scope["type"] == "http":
            name = host_name(Headers(scope=scope).get("host", ""))
            if name not in self._names and not is_loopback_name(name):
                error = ApiError(
                    403,
                    "host_not_allowed",
                    f"This server does not answer for the host {name[:80]!r}; if it should, list it in allowed_hosts",
                )
                await refuse(error, self._metrics, scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_name(header: str) -> str:
    """Return the name in a Host header, without port and brackets: "[::1]:8000" gives "::1"."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")
