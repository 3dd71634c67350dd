"""Reads bodies of Ollama's API as JSON with any content type: its examples use `curl -d`, which declares a form.

Pages elsewhere cannot use this: the guard of origins keeps their forms out.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from moeflow.server.guard.body import JsonRoute

_NAME = b"content-type"


class OllamaRoute(JsonRoute):
    """Gives endpoints requests that come as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler of JSON."""
        handle = super().get_route_handler()

        async def handle_any(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != _NAME]
            scope = {**request.scope, "headers": [*others, (_NAME, b"application/json")]}
            return await handle(Request(scope, request.receive))

        return handle_any
