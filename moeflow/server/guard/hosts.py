"""Keeps web pages elsewhere from reaching a loopback server through a name of their own (DNS rebinding).

Such a request carries the attacker's name in its Host header; ours carry loopback's.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from moeflow.core.loopback import is_loopback_name
from moeflow.server.config import ServerConfig
from moeflow.server.errors import ApiError
from moeflow.server.guard.refusal import Check


def host_check(config: ServerConfig) -> Check:
    """Return the check for requests for a host name that is not ours (403)."""
    names = {name.lower() for name in (config.host, *config.allowed_hosts)}

    def check(scope: Scope) -> ApiError | None:
        name = host_name(Headers(scope=scope).get("host", ""))
        if name in names or is_loopback_name(name):
            return None
        message = (
            f"This server does not answer for the host {name[:80]!r}. If it should, start it with --allowed-host and "
            "this name"
        )
        return ApiError(403, "host_not_allowed", message)

    return check


def host_name(header: str) -> str:
    """Return the name in a Host header, without port and brackets: "[::1]:8000" gives "::1"."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")
