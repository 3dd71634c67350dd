"""`GET /v1/models`: the models that are served, loaded or not."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from moeflow.server.api.codex_models import CodexModel, codex_model
from moeflow.server.served_model import ModelStatus, ServedModel
from moeflow.server.service import Service, get_service

router = APIRouter()


class ModelCard(BaseModel):
    """A model as clients list it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moeflow"
    max_model_len: int | None  # null until it is loaded
    status: ModelStatus
    default_sampling_params: dict[str, float] | None = Field(
        description="The model's defaults that differ from the engine's; null until it is loaded."
    )


class ModelList(BaseModel):
    """All models of this server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[CodexModel]


@router.get("/v1/models", tags=["OpenAI"])
async def list_models(service: Annotated[Service, Depends(get_service)]) -> ModelList:
    """List the served models."""
    require_names(service)
    cards = [_card(model) for model in service.models.all]
    models = [codex_model(card.id, card.max_model_len, number) for number, card in enumerate(cards)]
    return ModelList(data=cards, models=models)


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def get_model(name: str, service: Annotated[Service, Depends(get_service)]) -> ModelCard:
    """Describe a served model, without loading it."""
    require_names(service)
    return _card(service.models.find(name))


def require_names(service: Service) -> None:
    """Return if it is known what is served: one model is before it takes work. Raises: ApiError 503."""
    service.require_open()
    if service.models.only is not None:
        service.models.only.require(is_batch=False)


def _card(model: ServedModel) -> ModelCard:
    info = None if model.generator is None else model.info
    return ModelCard(
        id=model.name,
        created=model.created if info is None else info.created,
        max_model_len=None if info is None else info.max_model_len,
        status=model.status,
        default_sampling_params=None if info is None else info.sampling_defaults.changes(),
    )
