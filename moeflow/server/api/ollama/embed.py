"""`POST /api/embed` and the older `/api/embeddings`: texts in, a vector of each out, in Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from moeflow.core.embedding_bytes import decode_embedding
from moeflow.core.pooling_params import PoolingParams
from moeflow.engine.pooling_choice import check_pooling
from moeflow.server.api.ollama.embed_request import (
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
)
from moeflow.server.api.ollama.heads import nanoseconds
from moeflow.server.api.ollama.route import OllamaRoute
from moeflow.server.api.openapi import OLLAMA_ERRORS
from moeflow.server.api.pooled import pool
from moeflow.server.request_log import record_of
from moeflow.server.service import Service, get_service

PoolingChoice = Callable[[PoolingParams | None], PoolingParams | None]
router = APIRouter(route_class=OllamaRoute, tags=["Ollama"], responses=OLLAMA_ERRORS)


@router.post("/api/embed", response_model=OllamaEmbedResponse)
async def embed(
    body: OllamaEmbedRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Make a vector of one or several texts. Without a text the model is loaded."""
    record_of(request.scope).prompt = body.input if service.config.log_prompts else None
    return await _embedded(service, request, body.model, body.inputs(), body.pooling, is_cut=body.truncate is not False)


@router.post("/api/embeddings", response_model=OllamaEmbeddingsResponse)
async def embeddings(
    body: OllamaEmbeddingsRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Make a vector of a text."""
    record_of(request.scope).prompt = body.prompt if service.config.log_prompts else None
    inputs = [body.prompt] if body.prompt else []
    vectors = (await _embedded(service, request, body.model, inputs, lambda own: own, is_cut=True))["embeddings"]
    return {"embedding": vectors[0] if vectors else []}


async def _embedded(
    service: Service, request: Request, model: str | None, inputs: Sequence[str], choose: PoolingChoice, *, is_cut: bool
) -> dict[str, Any]:
    begun_s = time.monotonic()
    served = await service.require_model(model)
    loaded_s = time.monotonic()
    pooling = check_pooling(served.info, choose(served.info.pooling))
    vectors: list[bytes] = []
    num_tokens = 0
    if inputs:
        vectors, num_tokens = await pool(service, request, served, [*inputs], pooling, "embd", is_cut=is_cut)
    return {
        "model": served.name,
        "embeddings": [decode_embedding(data) for data in vectors],
        "total_duration": nanoseconds(time.monotonic() - begun_s),
        "load_duration": nanoseconds(loaded_s - begun_s),
        "prompt_eval_count": num_tokens,
    }
