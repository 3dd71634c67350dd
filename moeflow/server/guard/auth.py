"""One API key, asked for before anything of a request is read. Knows nothing of users or rights."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import Scope

from moeflow.server.errors import ApiError
from moeflow.server.guard.refusal import Check

_GUARDED = frozenset(("/classify", "/tokenize", "/detokenize", "/stats", "/metrics"))  # and all below /v1/


def api_key_check(api_key: str) -> Check:
    """Return the check for `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it, on the API
    (401); health, schema and page stay open.
    """
    expected = api_key.encode()

    def check(scope: Scope) -> ApiError | None:
        if not _is_guarded(scope["path"]):
            return None
        if any([hmac.compare_digest(key, expected) for key in _given_keys(Headers(scope=scope))]):
            return None
        message = "A valid API key is needed: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"
        return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})

    return check


def _given_keys(headers: Headers) -> list[bytes]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    given += [headers["x-api-key"].strip()] if "x-api-key" in headers else []
    # Header text is Latin-1 by HTTP; clients send keys as UTF-8 bytes.
    return [key.encode("latin-1") for key in given]


def _is_guarded(path: str) -> bool:
    return path in _GUARDED or path.startswith("/v1/")
