"""One API key, asked for before anything of a request is read. Knows nothing of users or rights."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moeflow.server.errors import ApiError
from moeflow.server.guard.refusal import refuse
from moeflow.server.metrics import Metrics

_GUARDED = frozenset(("/tokenize", "/detokenize", "/stats", "/metrics"))  # and all below /v1/


class ApiKeyGuard:
    """ASGI middleware: `Authorization: Bearer KEY` on the API; health, schema and page stay open."""

    def __init__(self, app: ASGIApp, api_key: str, metrics: Metrics) -> None:
        self._app = app
        self._expected = f"bearer {api_key}".encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or hand on."""
        if scope["type"] == "http" and _is_guarded(scope["path"]) and not self._has_key(scope):
            error = ApiError(
                401,
                "invalid_api_key",
                "A valid API key is needed: send the header `Authorization: Bearer KEY`",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refuse(error, self._metrics, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Header text is Latin-1 by HTTP; clients send keys as UTF-8 bytes.
        given = f"{scheme.lower()} {key.strip()}".encode("latin-1")
        return hmac.compare_digest(given, self._expected)


def _is_guarded(path: str) -> bool:
    return path in _GUARDED or path.startswith("/v1/")
