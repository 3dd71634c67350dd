"""The model of a request: loaded before it generates, and all that a request without a prompt asks for."""

from __future__ import annotations

import time
from typing import Any

from moeflow.server.api.ollama.generating_request import GeneratingRequest
from moeflow.server.api.ollama.heads import Shape, empty_answer
from moeflow.server.api.ollama.line_writer import RequestTimes
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service


async def loaded(service: Service, body: GeneratingRequest) -> tuple[ServedModel, RequestTimes]:
    """Return the model of a request, and when the request came and its model was loaded. Raises: ApiError."""
    begun_s = time.monotonic()
    served = await service.require_model(body.model)
    body.known_options.note_context(served.info.max_model_len)
    return served, RequestTimes(begun_s, time.monotonic())


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
