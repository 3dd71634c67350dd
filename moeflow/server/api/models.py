"""`GET /v1/models`: the models that are served, loaded or not."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from moeflow.core.engine_messages import ModelInfo
from moeflow.models.file_facts import FileFacts
from moeflow.server.api.codex_models import CodexModel, codex_model
from moeflow.server.served_model import ModelStatus, ServedModel
from moeflow.server.service import Service, get_service

router = APIRouter()


class ModelMeta(BaseModel):
    """Sizes of a model, by the names that llama.cpp's clients read. What its files do not tell is null."""

    n_ctx: int | None  # tokens of context that are served
    n_ctx_train: int | None  # that the model was made for
    n_params: int | None
    size: int | None  # bytes of its tensors, as they are stored
    n_vocab: int | None
    vocab_size: int | None


class ModelCard(BaseModel):
    """A model as clients list it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moeflow"
    max_model_len: int | None = Field(
        description="Until the model is loaded, the most that its files and the settings allow; memory may allow less. "
        "Null if its files cannot be read."
    )
    context_length: int | None = Field(description="The same, by the name that OpenRouter's clients read.")
    meta: ModelMeta
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
    cards = await asyncio.gather(*map(_card, service.models.all))
    models = [codex_model(card.id, card.max_model_len, number) for number, card in enumerate(cards)]
    return ModelList(data=cards, models=models)


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def get_model(name: str, service: Annotated[Service, Depends(get_service)]) -> ModelCard:
    """Describe a served model, without loading it."""
    require_names(service)
    return await _card(service.models.find(name))


def require_names(service: Service) -> None:
    """Return if the served model is known: a single model is known before it is ready. Raises: ApiError 503."""
    service.require_open()
    if service.models.only is not None:
        service.models.only.require(is_batch=False)


async def _card(model: ServedModel) -> ModelCard:
    facts = await model.file_facts()
    info = None if model.generator is None else model.info
    context = planned_context(model, facts) if info is None else info.max_model_len
    return ModelCard(
        id=model.name,
        created=model.created if info is None else info.created,
        max_model_len=context,
        context_length=context,
        meta=_meta(context, facts, info),
        status=model.status,
        default_sampling_params=None if info is None else info.sampling_defaults.changes(),
    )


def _meta(context: int | None, facts: FileFacts | None, info: ModelInfo | None) -> ModelMeta:
    sizes = facts if info is None else info
    vocab_size = None if sizes is None else sizes.vocab_size
    return ModelMeta(
        n_ctx=context,
        n_ctx_train=None if facts is None else facts.max_position,
        n_params=None if sizes is None else sizes.num_parameters,
        size=None if facts is None else facts.num_bytes,
        n_vocab=vocab_size,
        vocab_size=vocab_size,
    )


def planned_context(model: ServedModel, facts: FileFacts | None) -> int | None:
    """Return the context that a model has once it is loaded, if memory allows for it."""
    if facts is None or model.source is None:
        return None
    return min(model.source.max_model_len or facts.max_position, facts.max_position)
