"""Whom the server lets manage its models and engines, and read its log.

A change needs an API key: a server without keys takes none. Only the server's own page and programs may ask, so even
origins that `--cors-origin` allows are refused. Without keys, reading is for programs and the page on this machine.
"""

from __future__ import annotations

from fastapi import Request
from starlette.datastructures import Headers

from moeflow.server.config import ServerConfig
from moeflow.server.errors import ApiError
from moeflow.server.guard.origins import is_ours
from moeflow.server.request_log import record_of

_WITH_KEY = "start it with `MOEFLOW_API_KEY=SECRET moeflow serve ...`, or with `--api-keys-file FILE`"


def change_refusal(config: ServerConfig) -> str:
    """Return why no change is accepted, with the remedy; "" where a key is enough."""
    return "" if config.needs_key else f"Changes need an API key, which this server lacks: {_WITH_KEY}"


def may_change(request: Request) -> None:
    """Return if a request may change models or engines; for FastAPI's `Depends`. Raises: ApiError 403."""
    config = _config_of(request)
    _require_own_page(request)
    if reason := change_refusal(config):
        raise ApiError(403, "api_key_needed", reason)
    _require_key(request)


def may_read(request: Request) -> None:
    """Return if a request may read about this machine; for FastAPI's `Depends`. Raises: ApiError 403."""
    config = _config_of(request)
    _require_own_page(request)
    if config.needs_key:
        _require_key(request)
    elif not is_for_this_machine(config):
        message = f"To let other machines read this, the server needs an API key: {_WITH_KEY}"
        raise ApiError(403, "api_key_needed", message)


def _config_of(request: Request) -> ServerConfig:
    config: ServerConfig = request.app.state.service.config
    return config


def is_from_own_page(request: Request) -> bool:
    """Return whether the server's own page asks, or a program, and not a web page of another origin."""
    return is_ours(Headers(scope=request.scope), {name.lower() for name in _config_of(request).allowed_hosts})


def is_for_this_machine(config: ServerConfig) -> bool:
    """Return whether only programs of this machine can ask, as far as the settings tell: a proxy brings others."""
    return config.is_loopback and not (config.allowed_hosts or config.root_path or config.forwarded_allow_ips)


def _require_own_page(request: Request) -> None:
    if not is_from_own_page(request):
        message = "Only this server's own page and programs may do this, not a web page of another origin"
        raise ApiError(403, "origin_not_allowed", message)


def _require_key(request: Request) -> None:
    """Return if the guard of keys has let the request in: a path that it does not guard stays closed."""
    if record_of(request.scope).account is None:
        raise ApiError(403, "api_key_needed", "A valid API key is needed")
