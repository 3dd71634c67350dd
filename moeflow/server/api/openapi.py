"""What the OpenAPI document says beyond FastAPI's own: errors of every endpoint, events of the streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moeflow.server.errors import ErrorResponse

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; the message says why."},
    "5XX": {"model": ErrorResponse, "description": "The server cannot answer now, or failed."},
}
_REF = "#/components/schemas/{model}"


def stream_of(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for an endpoint that can also stream such chunks."""
    schema = {
        "type": "string",
        "description": "Server-sent events: each `data:` is one chunk; the last is `[DONE]`.",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(model=chunk.__name__)},
    }
    description = "The whole answer, or with `stream: true` its chunks as events."
    return {200: {"description": description, "content": {"text/event-stream": {"schema": schema}}}}


def add_chunk_schemas(app: FastAPI, *chunks: type[BaseModel]) -> None:
    """Put the models that `stream_of` refers to into the document; FastAPI cannot see them by itself."""
    write = app.openapi

    def openapi() -> dict[str, Any]:
        document = write()
        _, schemas = models_json_schema([(chunk, "serialization") for chunk in chunks], ref_template=_REF)
        document["components"]["schemas"] |= schemas["$defs"]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
