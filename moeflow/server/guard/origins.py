"""Keeps web pages elsewhere from changing anything here: a browser sends their forms and body-less requests to any
server, loopback's too, without asking it first.

Browsers send where a request comes from, and no page can change it: `Sec-Fetch-Site` (on HTTPS and to
loopback), else `Origin`. Programs send neither. Safe methods pass: a page elsewhere can read an answer only if its
origin is allowed (CORS). Such origins pass with all methods.

Source: the Fetch Metadata and Fetch standards; Go's net/http.CrossOriginProtection decides in the same order.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from moeflow.server.config import ServerConfig
from moeflow.server.errors import ApiError
from moeflow.server.guard.refusal import Check

_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_OUR_SITES = frozenset(("same-origin", "none"))  # our page; the user in person (an address typed in, an extension)
_DEFAULT_PORTS = {"http": 80, "https": 443}

Place = tuple[str, int | None]  # host name and port


def origin_check(config: ServerConfig) -> Check:
    """Return the check for unsafe requests that a page of another origin has sent (403)."""
    allowed_names = {name.lower() for name in config.allowed_hosts}

    def check(scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if scope["method"] in _SAFE_METHODS or is_ours(headers, allowed_names) or _is_allowed(headers, config):
            return None
        message = (
            "A web page of another origin may not do this. If the page is this server's own, behind a proxy, "
            "start the server with --allowed-host and the page's host name; to allow another page, with --cors-origin "
            "and its origin"
        )
        return ApiError(403, "origin_not_allowed", message)

    return check


def _is_allowed(headers: Headers, config: ServerConfig) -> bool:
    """Return whether the page's origin may use the API."""
    origins = headers.getlist("origin")
    return bool(origins) and ("*" in config.cors_origins or set(origins) <= set(config.cors_origins))


def is_ours(headers: Headers, allowed_names: set[str]) -> bool:
    """Return whether a request comes from our own page or from a program. `allowed_names`: of hosts, in lower case."""
    sites = headers.getlist("sec-fetch-site")
    if sites:
        return all(site.strip().lower() in _OUR_SITES for site in sites)
    host = headers.get("host", "")
    return all(_is_our_origin(origin, host, allowed_names) for origin in headers.getlist("origin"))


def _is_our_origin(origin: str, host: str, allowed_names: set[str]) -> bool:
    """Return whether an origin is the place that the request was sent to, or an allowed name.

    The scheme is not compared: a proxy may speak TLS for us.
    """
    scheme = origin.partition("://")[0].lower()
    default_port = _DEFAULT_PORTS.get(scheme)
    place, target = _place(origin, default_port), _place(f"{scheme}://{host}", default_port)
    if default_port is None or place is None or target is None:
        return False  # also "null", of pages without an origin
    name, port = place
    return place == target or (name in allowed_names and port in (target[1], default_port))


def _place(url: str, default_port: int | None) -> Place | None:
    """Return host name and port of a URL without a path; None if it is not one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return parts.hostname.rstrip("."), port or default_port
