"""`GET /stats/speed`: how fast a model is beside the machine's roofs and its plan, and what would help most."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query

from moeflow.core.observation import SpeedQuestion, SpeedSight
from moeflow.kernels.on_demand import on_demand
from moeflow.server.service import Service, get_service
from moeflow.server.speed.speed_objects import AdviceItem, AdviceList, Now, SpeedResponse

with on_demand(__name__):
    from moeflow.server.speed import measured, speed_report

router = APIRouter(tags=["status"])
_NOT_LOADED = "the model is not loaded"
_NO_PLAN = "the server knows no plan of this model"


@router.get("/stats/speed", response_model=SpeedResponse)
async def speed(
    service: Annotated[Service, Depends(get_service)],
    model: Annotated[str | None, Query(description="Name of the model; default: the first.")] = None,
) -> SpeedResponse:
    """Return the roofs of the machine, where passes lie now, and the plan's figures beside measured ones.

    Passes are measured while somebody asks, and for a minute after that. Advice is worked out once, while no engine
    computes.
    """
    chosen = service.models.find(model)
    if chosen.generator is None:
        return _unknown(_NOT_LOADED)
    sights = await chosen.look(SpeedQuestion())
    known = service.speed_of(chosen)
    if known is None:
        return _unknown(_NO_PLAN)
    known.advice.ask()
    estimate = await known.estimate()
    if isinstance(estimate, str):
        return _unknown(estimate)
    seen = measured.Measured({place: it for place, it in sights.items() if isinstance(it, SpeedSight)})
    is_only = sum(it.generator is not None for it in service.models.all) == 1
    found = await asyncio.to_thread(
        speed_report.report, estimate, seen, chosen.stats(), known.others, is_only_model=is_only
    )
    advice = known.advice
    items = None if advice.found is None else [AdviceItem(**msgspec.structs.asdict(it)) for it in advice.found]
    return SpeedResponse(
        **msgspec.structs.asdict(found), advice=AdviceList(items=items, unknown=advice.why_not), unknown=""
    )


def _unknown(why: str) -> SpeedResponse:
    """Return an answer without anything."""
    return SpeedResponse(
        model=None,
        roofs=None,
        now=Now(decode=None, prompts=None, observed_s=0.0, other_programs=None, unknown=why),
        trail=[],
        marks=[],
        predicted=[],
        memory=None,
        advice=AdviceList(items=None, unknown=why),
        unknown=why,
    )
