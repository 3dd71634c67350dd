"""What the OpenAPI document has beyond FastAPI's own: errors of every endpoint, events of the streams, the model's
limits.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moeflow.server.api.schema.model_limits import state_limits
from moeflow.server.errors import ErrorResponse, OllamaErrorResponse
from moeflow.server.service import Service
from moeflow.server.sse import NDJSON

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; the message gives the reason."},
    "5XX": {"model": ErrorResponse, "description": "The server cannot answer now, or failed."},
}
OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**answer, "model": OllamaErrorResponse} for status, answer in ERRORS.items()
}
_REF = "#/components/schemas/{model}"


def stream_of(*chunks: type[BaseModel], is_typed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for an endpoint that can also stream such chunks.

    Streams that are typed have a name for each event; others end with [DONE], or with an error.
    """
    models: tuple[type[BaseModel], ...] = chunks if is_typed else (*chunks, ErrorResponse)
    payloads = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": payloads},
    }
    if not is_typed:
        says = "A chunk; an error, if the stream fails; `[DONE]` at the end."
        data = {"description": says, "anyOf": [data, {"const": "[DONE]"}]}
    named = {"event": {"type": "string", "description": "The type of the data."}} if is_typed else {}
    # Of each event, as OpenAPI 3.2 has it and FastAPI writes it, too: no JSON Schema could describe the whole stream.
    item = {"type": "object", "properties": {**named, "data": data}, "required": [*named, "data"]}
    description = "The whole answer, or with `stream: true` its chunks as events."
    return {200: {"description": description, "content": {"text/event-stream": {"itemSchema": item}}}}


def lines_of(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for an endpoint that streams such chunks as lines of JSON, or gives one of them."""
    item = {"anyOf": [{"$ref": _REF.format(model=model.__name__)} for model in (chunk, OllamaErrorResponse)]}
    description = "Its parts as lines, the last one with `done: true`; with `stream: false` the whole answer."
    return {200: {"description": description, "content": {NDJSON: {"itemSchema": item}}}}


def complete_document(app: FastAPI, service: Service, *unseen: type[BaseModel]) -> None:
    """Add parts that FastAPI cannot derive: the models that `stream_of` refers to, and the limits of the served model
    once it is loaded. Of several models, each has its own limits.
    """
    write = app.openapi

    def openapi() -> dict[str, Any]:
        document = write()
        _, schemas = models_json_schema([(model, "serialization") for model in unseen], ref_template=_REF)
        document["components"]["schemas"] |= schemas["$defs"]
        model = None if service.loaded is None else service.loaded.client.model
        stated: dict[str, Any] = state_limits(document, model, service.config.max_queue)
        return stated

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
