"""Answers of a running server of moeflow, for verbs that ask one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx

from moeflow.core.errors import ConfigError, EngineError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_TIMEOUT_S: Final = 30.0


def server_at(url: str, api_key: str | None) -> httpx.Client:
    """Return a client of the server. Close it."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no address of a server ({error}): write http://HOST:PORT") from None


def answer(server: httpx.Client, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return a server's answer. Raises: EngineError if there is none, ConfigError if it refuses."""
    try:
        response = server.request(method, path, json=body)
        found = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(
            f"no server of moeflow answers at {server.base_url}: {error}. Start one, or give its address"
        ) from None
    if response.is_error:
        refusal = found.get("error", found) if isinstance(found, dict) else found
        raise ConfigError(str(refusal.get("message", refusal)) if isinstance(refusal, dict) else str(refusal))
    return dict(found)
