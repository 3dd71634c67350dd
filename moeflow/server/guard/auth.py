"""One API key, asked for before anything of a request is read. Knows nothing of users or rights."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import Scope

from moeflow.server.errors import ApiError
from moeflow.server.guard.refusal import Check

_GUARDED = frozenset(("/classify", "/tokenize", "/detokenize", "/stats", "/metrics"))  # and all below /v1/


def api_key_check(api_key: str) -> Check:
    """Return the check for `Authorization: Bearer KEY` on the API (401); health, schema and page stay open."""
    expected = f"bearer {api_key}".encode()

    def check(scope: Scope) -> ApiError | None:
        if not _is_guarded(scope["path"]):
            return None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Header text is Latin-1 by HTTP; clients send keys as UTF-8 bytes.
        given = f"{scheme.lower()} {key.strip()}".encode("latin-1")
        if hmac.compare_digest(given, expected):
            return None
        message = "A valid API key is needed: send the header `Authorization: Bearer KEY`"
        return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})

    return check


def _is_guarded(path: str) -> bool:
    return path in _GUARDED or path.startswith("/v1/")
