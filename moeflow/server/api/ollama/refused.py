"""Ollama's endpoints that change which models there are: the server's start decides that here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from moeflow.server.errors import ApiError

_REASONS = {
    ("POST", "/api/push"): "does not push models. Copy the model's files yourself",
    ("POST", "/api/create"): "does not create models. Start it with --model and the model's folder",
    ("POST", "/api/copy"): "does not copy models. Start it with --model NAME=PATH for another name",
    ("DELETE", "/api/delete"): "does not delete models. Start it without the model",
    ("POST", "/api/blobs/{digest}"): "takes no files of models. Start it with --model and the model's folder",
}

router = APIRouter(include_in_schema=False)


def _refusing(reason: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise ApiError(400, "not_supported", f"this server {reason}")

    return refuse


for (_method, _path), _reason in _REASONS.items():
    router.add_api_route(_path, _refusing(_reason), methods=[_method])
