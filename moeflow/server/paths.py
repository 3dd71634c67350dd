"""The path of a request as the API defines it: without the prefix that a proxy has removed (`--root-path`), and as the
endpoint's path.

ASGI puts that prefix in front of each path, so the plain path of a scope matches no name of an endpoint.
"""

from __future__ import annotations

from typing import Final

from starlette.routing import Match, Route
from starlette.types import Scope

API_PREFIXES: Final = ("/v1/", "/v2/", "/api/")  # of the paths of endpoints that clients use
OTHER = "other"  # in the place of an endpoint's path


def api_path(scope: Scope) -> str:
    """Return the path below the prefix, as the router sees it: a prefix ends before a slash."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path


def raw_api_path(scope: Scope) -> bytes:
    """Return the path below the prefix as the client sent it, with its escapes."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    return raw.removeprefix(scope.get("root_path", "").encode("ascii"))


def matching_routes(scope: Scope) -> list[Route]:
    """Return the routes of the application that have this path, with any method."""
    routes: list[Route] = []
    for route in scope["app"].router.routes:  # FastAPI nests the routes of a router
        routes += getattr(getattr(route, "original_router", None), "routes", (route,))
    return [route for route in routes if route.matches(scope)[0] is not Match.NONE]


def endpoint_of(scope: Scope) -> str:
    """Return the path of the endpoint that a request is for, as the API's document has it; `other` if it has none."""
    if "app" not in scope:
        return OTHER  # the request did not come as far as the application
    routed = scope.get("route")  # by the application, which a guard may have kept it from
    routes = [routed] if isinstance(routed, Route) and routed.include_in_schema else matching_routes(scope)
    return next((route.path for route in routes if route.include_in_schema), OTHER)
