"""`POST /rerank` and `/score`: how alike texts are, by the cosine of their vectors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from numpy.typing import NDArray

from moeflow.engine.pooling_choice import check_pooling
from moeflow.server.api.pooled import pool
from moeflow.server.api.pooling.embedding_objects import pooling_of
from moeflow.server.api.pooling.score_objects import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    ScoringFields,
)
from moeflow.server.errors import ApiError
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


@router.post("/v2/rerank", response_model=RerankResponse, tags=["vLLM"])
@router.post("/v1/rerank", response_model=RerankResponse, tags=["vLLM"])
@router.post("/rerank", response_model=RerankResponse, tags=["vLLM"])
async def rerank(
    body: RerankRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Order documents by how alike they and a query are."""
    texts = body.texts()
    scores, model, usage = await _compare(service, request, body, [(body.query, text) for text in texts])
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    shows_text = body.return_documents is not False
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model,
        "usage": usage,
        "results": [
            {
                "index": index,
                "document": {"text": texts[index]} if shows_text else None,
                "relevance_score": scores[index],
            }
            for index in best
        ],
    }


@router.post("/v1/score", response_model=ScoreResponse, tags=["vLLM"])
@router.post("/score", response_model=ScoreResponse, tags=["vLLM"])
async def score(
    body: ScoreRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Compare pairs of texts."""
    scores, model, usage = await _compare(service, request, body, body.pairs())
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": usage,
    }


async def _compare(
    service: Service, request: Request, body: ScoringFields, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], str, dict[str, int]]:
    """Return the cosine of each pair's vectors, the model's name, and the tokens. A text has one vector in all pairs.

    Raises: ApiError, EngineError, RequestError.
    """
    places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    record_of(request.scope).prompt = [*places] if service.config.log_prompts else None
    served = await service.require_model(body.model)
    model = served.info
    if model.labels:
        message = (
            "this model sorts texts into classes (/classify), which are no scores; ask a model of embeddings instead"
        )
        raise ApiError(404, "no_scores", message, param="model")
    pooling = check_pooling(model, pooling_of(model, body.pooling))
    vectors, num_tokens = await pool(service, request, served, [*places], pooling, "score")
    units = _of_length_one(np.array([np.frombuffer(vector, "<f4") for vector in vectors], np.float64))
    first, second = ([places[text] for text in side] for side in zip(*pairs, strict=True))
    scores: list[float] = (units[first] * units[second]).sum(1).clip(-1, 1).tolist()
    return scores, model.name, {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _of_length_one(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return vectors [N, H] brought to length 1; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)
