"""`POST /classify`, as vLLM has it: texts or token ids in, the probability of each of the model's classes out."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from moeflow.core.embedding_bytes import decode_embedding
from moeflow.core.errors import RequestError
from moeflow.engine.pooling_choice import classification
from moeflow.server.api.pooled import pool
from moeflow.server.api.pooling.classification_objects import ClassificationRequest, ClassificationResponse
from moeflow.server.errors import ApiError
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/classify", response_model=ClassificationResponse, tags=["vLLM"])
@router.post("/classify", response_model=ClassificationResponse, tags=["vLLM"])
async def classify(
    body: ClassificationRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> dict[str, Any]:
    """Sort one or several texts into the model's classes. A model without classes is as good as not there."""
    record_of(request.scope).prompt = body.input if service.config.log_prompts else None
    served = await service.require_model(body.model)
    model = served.info
    try:
        pooling = classification(model)
    except RequestError as error:
        raise ApiError(404, "no_classes", str(error), param="model") from error
    found, num_tokens = await pool(service, request, served, body.inputs(), pooling, "classify")
    probabilities = [decode_embedding(data) for data in found]
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [
            {"index": index, "label": model.labels[probs.index(max(probs))], "probs": probs, "num_classes": len(probs)}
            for index, probs in enumerate(probabilities)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
