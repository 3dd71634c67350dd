"""Requests without a prompt: they have a model loaded, or unloaded, and generate nothing."""

from __future__ import annotations

from typing import Any

from moeflow.server.api.ollama.generating_request import GeneratingRequest
from moeflow.server.api.ollama.heads import Shape, empty_answer
from moeflow.server.service import Service


async def load_or_unload(service: Service, body: GeneratingRequest, shape: Shape) -> dict[str, Any]:
    """Load the model, or unload it if the request asks for that, and return the answer.

    A model that is busy, or that the server was started with alone, stays loaded.

    Raises: ApiError.
    """
    if body.is_to_unload:
        service.require_open()
        model = service.models.find(body.model)
        service.models.unload(model)
        return empty_answer(model.name, shape, "unload")
    model = await service.require_model(body.model)
    return empty_answer(model.name, shape, "load")
