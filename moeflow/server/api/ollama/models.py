"""`/api/tags`, `/api/ps`, `/api/show`, `/api/version`: the models that are served, in Ollama's API."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends

from moeflow.server.api.model_facts import model_facts
from moeflow.server.api.models import require_names
from moeflow.server.api.ollama.model_objects import (
    OllamaLoadedModels,
    OllamaModels,
    OllamaShown,
    OllamaShowRequest,
    OllamaVersion,
    listed,
    listed_as_loaded,
    shown,
)
from moeflow.server.api.ollama.route import OllamaRoute
from moeflow.server.api.openapi import OLLAMA_ERRORS
from moeflow.server.service import Service, get_service

# Clients compare it with the version that they need. This is the one that this API follows.
OLLAMA_VERSION: Final = "0.17.6"

router = APIRouter(route_class=OllamaRoute, tags=["Ollama"], responses=OLLAMA_ERRORS)


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def tags(service: Annotated[Service, Depends(get_service)]) -> OllamaModels:
    """List the served models, loaded or not."""
    require_names(service)
    facts = [await model_facts(model) for model in service.models.all]
    return OllamaModels(models=[listed(each) for each in facts])


@router.get("/api/ps")
async def loaded_models(service: Annotated[Service, Depends(get_service)]) -> OllamaLoadedModels:
    """List the models that are loaded."""
    loaded = [model for model in service.models.named if model.generator is not None]
    facts = [await model_facts(model) for model in loaded]
    return OllamaLoadedModels(models=[listed_as_loaded(each) for each in facts if each.info is not None])


@router.post("/api/show")
async def show(body: OllamaShowRequest, service: Annotated[Service, Depends(get_service)]) -> OllamaShown:
    """Describe a served model, without loading it."""
    require_names(service)
    model = service.models.find(body.model or body.name or None)
    return shown(await model_facts(model))


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def version() -> OllamaVersion:
    """Return the version of Ollama's API. The version of moeflow is at `/version`."""
    return OllamaVersion(version=OLLAMA_VERSION)
