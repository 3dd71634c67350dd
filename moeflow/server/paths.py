"""The path of a request as the API defines it: without the prefix that a proxy has removed (`--root-path`).

ASGI puts that prefix in front of each path, so the plain path of a scope matches no name of an endpoint.
"""

from __future__ import annotations

from starlette.types import Scope


def api_path(scope: Scope) -> str:
    """Return the path below the prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def raw_api_path(scope: Scope) -> bytes:
    """Return the path below the prefix as the client sent it, with its escapes."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    return raw.removeprefix(scope.get("root_path", "").encode("ascii"))
