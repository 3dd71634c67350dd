"""`GET /api/v0/models`: the models that are served, as LM Studio's clients list them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from moeflow.server.api.model_facts import ModelFacts, model_facts
from moeflow.server.api.models import require_names
from moeflow.server.api.openapi import OLLAMA_ERRORS
from moeflow.server.service import Service, get_service

router = APIRouter(tags=["LM Studio"], responses=OLLAMA_ERRORS)


class LmStudioModel(BaseModel):
    """A model, loaded or not. Unknown fields of one that is not loaded are empty."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: str
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int


class LmStudioModels(BaseModel):
    """All models of this server."""

    object: Literal["list"] = "list"
    data: list[LmStudioModel]


@router.get("/api/v0/models")
async def list_models(service: Annotated[Service, Depends(get_service)]) -> LmStudioModels:
    """List the served models."""
    require_names(service)
    facts = [await model_facts(model) for model in service.models.all]
    return LmStudioModels(data=[_model(each) for each in facts])


@router.get("/api/v0/models/{name:path}")
async def get_model(name: str, service: Annotated[Service, Depends(get_service)]) -> LmStudioModel:
    """Describe a served model, without loading it."""
    require_names(service)
    return _model(await model_facts(service.models.find(name)))


def _model(facts: ModelFacts) -> LmStudioModel:
    return LmStudioModel(
        id=facts.name,
        type="embeddings" if facts.capabilities == ("embedding",) else "llm",
        publisher="moeflow",
        arch=facts.architecture,
        compatibility_type=facts.file_format,
        quantization=facts.quantization,
        state="not-loaded" if facts.info is None else "loaded",
        max_context_length=facts.context_length or 0,
    )
