"""`GET /stats/experts`: which experts tokens choose, and where experts are. Engines count while somebody asks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel

from moeflow.core.observation import ExpertQuestion, ExpertSight
from moeflow.server.api.status import EXPOSITION_TYPE
from moeflow.server.errors import ApiError
from moeflow.server.expert_exposition import exposition
from moeflow.server.expert_sums import as_json
from moeflow.server.service import Service, get_service

router = APIRouter(tags=["status"])

Counts = list[list[int]]  # of each layer in `layers`: of each expert


class TokensOfExperts(BaseModel):
    """How many tokens each expert got in some passes."""

    tokens: int  # in the passes, drafted ones included
    tokens_of_layers: list[int]  # that each layer got: all, except in an encoder-decoder
    counts: Counts  # a layer's counts add up to its tokens times top_k


class ExpertsOfEngines(BaseModel):
    """The counts of one engine or more."""

    layers: list[int]  # with routers; an encoder's come first
    num_encoder_layers: int  # of these
    num_experts: int
    top_k: int
    is_counting: bool  # false: see not_counted
    counted_s: float  # since counting began
    num_passes: int
    total: TokensOfExperts  # since counting began
    last_pass: TokensOfExperts
    last_minute: TokensOfExperts
    tiers: list[str]  # memories that may have an expert, the fastest first
    residency: Counts  # places in tiers
    hits: Counts | None  # an expert was there when a pass needed it; null: there is no cache of experts
    misses: Counts | None  # it was not there, or on its way
    read_bytes: int  # of experts, from disk, since counting began
    stall_s: float  # that passes waited for them
    not_counted: str  # missing layers or passes, and the reason; empty: none are missing


class ExpertsResponse(ExpertsOfEngines):
    """The sums over the engines of a model; places of experts are those of the first engine."""

    model: str
    replicas: list[ExpertsOfEngines]  # each engine that has answered, if there are several


@router.get(
    "/stats/experts",
    response_model=ExpertsResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def experts(
    service: Annotated[Service, Depends(get_service)],
    model: Annotated[str | None, Query(description="Name of the model; default: the first.")] = None,
    format: Annotated[Literal["json", "prometheus"], Query(description="Of the answer.")] = "json",
) -> Response:
    """Return how many tokens each expert got, and where each expert is.

    Engines count from the first question until a minute after the last one. `format=prometheus` has counters of tokens
    by expert and a histogram of loads.
    """
    chosen = service.models.find(model)
    if chosen.generator is None:
        raise chosen.refusal()
    answers = await chosen.look(ExpertQuestion())
    sights = [sight for sight in answers.values() if isinstance(sight, ExpertSight)]
    if not sights:
        message = "No engine has answered within two seconds: a pass takes longer, or the engine has ended; try again"
        raise ApiError(503, "engine_busy", message, headers={"Retry-After": "1"})
    if format == "prometheus":
        return Response(exposition(chosen.name, sights), media_type=EXPOSITION_TYPE)
    replicas: list[dict[str, Any]] = [as_json([sight]) for sight in sights] if len(sights) > 1 else []
    found = {"model": chosen.name, **as_json(sights), "replicas": replicas}
    return Response(msgspec.json.encode(found), media_type="application/json")
