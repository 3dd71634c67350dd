"""An API key, asked for before anything of a request is read, and the limits of that key."""

from __future__ import annotations

import math

from starlette.datastructures import Headers
from starlette.types import Scope

from moeflow.server.errors import ApiError
from moeflow.server.guard.api_keys import Account, ApiKeys
from moeflow.server.guard.refusal import Check
from moeflow.server.paths import API_PREFIXES, api_path
from moeflow.server.request_log import record_of

_GUARDED = frozenset(  # and all of the API
    ("/classify", "/rerank", "/score", "/tokenize", "/detokenize", "/stats", "/metrics", "/version", "/replicas")
)
_GUARDED_BELOW = ("/stats/", "/models/")


def api_key_check(keys: ApiKeys) -> Check:
    """Return the check for `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it, on the API
    (401), and for a key's limits (429); health, schema and page stay open.
    """

    def check(scope: Scope) -> ApiError | None:
        if not _is_guarded(api_path(scope)):
            return None
        accounts = [account for key in given_keys(Headers(scope=scope)) if (account := keys.find(key))]
        if accounts:
            return _check_limits(scope, accounts[0])
        message = "A valid API key is needed: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"
        return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})

    return check


def _check_limits(scope: Scope, account: Account) -> ApiError | None:
    """Note whose request it is, and refuse work beyond the limits; to look at something is no work."""
    record = record_of(scope)
    record.account = account
    wait_s = account.begin(record) if scope["method"] == "POST" else 0.0
    if wait_s == 0.0:
        return None
    retry_after = {"Retry-After": str(math.ceil(wait_s))}
    message = f"The limit per minute of the key {account.name!r} is reached; try again in {math.ceil(wait_s)} s"
    return ApiError(429, "rate_limit_exceeded", message, headers=retry_after)


def given_keys(headers: Headers) -> list[bytes]:
    """Return the keys that a request was sent with."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer] if scheme.lower() == "bearer" else []
    given += [headers["x-api-key"]] if "x-api-key" in headers else []
    # Header text is Latin-1 by HTTP; clients send keys as UTF-8 bytes. The last byte may be a space in Latin-1.
    return [key.encode("latin-1").strip() for key in given]


def _is_guarded(path: str) -> bool:
    """Return whether the router may find an endpoint of the API there. It ignores a newline at the end of a path."""
    return path.removesuffix("\n") in _GUARDED or path.startswith((*API_PREFIXES, *_GUARDED_BELOW))
