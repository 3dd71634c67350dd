"""`POST /v1/embeddings`: texts or token ids in, a vector of each out."""

from __future__ import annotations

import base64
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from moeflow.core.embedding_bytes import decode_embedding
from moeflow.engine.pooling_choice import check_pooling
from moeflow.server.api.pooled import pool
from moeflow.server.api.pooling.embedding_objects import EmbeddingRequest, EmbeddingResponse, pooling_of
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings", response_model=EmbeddingResponse, tags=["OpenAI"])
async def create_embeddings(
    body: EmbeddingRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Make a vector of one or several texts: of the model's last hidden states."""
    record_of(request.scope).prompt = body.input if service.config.log_prompts else None
    served = await service.require_model(body.model)
    model = served.info
    pooling, inputs = check_pooling(model, pooling_of(model, body.pooling, body.dimensions)), body.inputs()

    vectors, num_tokens = await pool(service, request, served, inputs, pooling, "embd")
    is_base64 = body.encoding_format == "base64"
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(data).decode() if is_base64 else decode_embedding(data),
            }
            for index, data in enumerate(vectors)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
