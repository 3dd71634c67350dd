"""`GET /v1/models`: the one model that is served, and the check that a request means it."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from moeflow.engine.messages import ModelInfo
from moeflow.server.errors import ApiError
from moeflow.server.service import Service, get_service

router = APIRouter()


class ModelCard(BaseModel):
    """A model as clients list it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moeflow"
    max_model_len: int


class ModelList(BaseModel):
    """All models of this server: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def served_model(service: Service, name: str | None) -> ModelInfo:
    """Return the served model if that is the one asked for; no name is also fine.

    Raises: ApiError 404 for another name, 503 while there is no model.
    """
    model = service.require_generator().client.model
    if name is not None and name != model.name:
        message = f"The model {name[:80]!r} is not served here; this server has {model.name!r}"
        raise ApiError(404, "model_not_found", message, param="model")
    return model


@router.get("/v1/models", tags=["OpenAI"])
async def list_models(service: Annotated[Service, Depends(get_service)]) -> ModelList:
    """List the served model."""
    return ModelList(data=[_card(served_model(service, None))])


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def get_model(name: str, service: Annotated[Service, Depends(get_service)]) -> ModelCard:
    """Describe the served model."""
    return _card(served_model(service, name))


def _card(model: ModelInfo) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)
