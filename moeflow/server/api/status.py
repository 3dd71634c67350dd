"""`/health`, `/ready`, `/version`, `/stats`, `/metrics`: the server's state, for orchestrators, the page and
Prometheus.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, create_model

from moeflow.core.engine_messages import (
    EncoderInfo,
    EngineStats,
    LenderStats,
    ModelInfo,
    RankStats,
    SpeculatorStats,
    TrialStats,
)
from moeflow.engine.client import EngineState
from moeflow.server.build import version
from moeflow.server.served_model import ModelStatus
from moeflow.server.service import Service, Status, get_service

router = APIRouter(tags=["status"])
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusResponse(BaseModel):
    """One word."""

    status: Status


class HealthResponse(StatusResponse):
    """And how many engines compute."""

    num_replicas: int  # of all models; 0 until one begins to load
    num_replicas_ready: int
    starting: list[str]  # progress of engines that start, with their machines


def _fields(struct: type[msgspec.Struct], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a message's fields as pydantic's, so that the document names them all and neither list can lag."""
    return {field.name: (field.type, ...) for field in msgspec.structs.fields(struct) if field.name not in without}


_PRIVATE = ("path",)  # clients must not see the model's path
EncoderFacts: Any = create_model("EncoderFacts", **_fields(EncoderInfo))
ModelFacts: Any = create_model(
    "ModelFacts",
    **_fields(ModelInfo, without=_PRIVATE) | {"encoder": (EncoderFacts | None, ...)},  # null: decoder-only
)
RankFacts: Any = create_model("RankFacts", **_fields(RankStats))
LenderFacts: Any = create_model("LenderFacts", **_fields(LenderStats))
SpeculatorFacts: Any = create_model("SpeculatorFacts", **_fields(SpeculatorStats))
TrialFacts: Any = create_model("TrialFacts", **_fields(TrialStats))
_LISTS: Any = {
    "ranks": (list[RankFacts], ...),  # of the processes that share a model; empty if there is one
    "lenders": (list[LenderFacts], ...),  # of memory for experts
    "speculators": (list[SpeculatorFacts], ...),  # that draft tokens
    "trials": (list[TrialFacts], ...),  # of helpers that may make passes faster
}
ReplicaFacts: Any = create_model(
    "ReplicaFacts",
    state=(EngineState, ...),
    is_slow=(bool, ...),  # it gets no new sequences
    host=(str, ...),  # name of its machine; empty: the server's
    activity=(str, ...),  # progress of its start; empty: none is known
    **_fields(EngineStats) | _LISTS,
)


class ServedModelFacts(BaseModel):
    """A model that is served, loaded or not."""

    name: str  # empty until it is known
    status: ModelStatus
    memory_bytes: int  # that it was planned to hold, of the memory that several models share; 0: not loaded, or alone
    num_loads: int  # because requests asked for it


StatsResponse: Any = create_model(
    "StatsResponse",
    status=(Status, ...),
    uptime_s=(float, ...),
    num_unfinished=(int, ...),  # sequences as the queue bound counts them
    model=(ModelFacts | None, ...),  # null until it is loaded, and where all of several are meant
    models=(list[ServedModelFacts], ...),
    replicas=(list[ReplicaFacts], ...),  # each of the engines; all other numbers are totals
    **_fields(EngineStats) | _LISTS,
)


@router.get("/health", response_model=HealthResponse)
@router.head("/health", include_in_schema=False)
async def health(service: Annotated[Service, Depends(get_service)]) -> Any:
    """Answer 200 as long as the server need not be restarted, else 503.

    It need not while one of its engines computes, or is started anew, nor where models are loaded when they are asked
    for. If no engine answers, that is one reason. The server ends stalled engines after a while, so monitoring should
    be patient.
    """
    if service.status in ("failed", "stalled"):
        return _unavailable(service)
    replicas = service.models.replicas()
    ready = [replica for replica in replicas if replica.state is EngineState.READY]
    return HealthResponse(
        status=service.status,
        num_replicas=len(replicas),
        num_replicas_ready=len(ready),
        # Names of machines and models are for clients with a key.
        starting=[] if service.keys else [f"{it.host or 'server'}: {it.activity}" for it in replicas if it.activity],
    )


@router.get("/ready", response_model=StatusResponse)
@router.head("/ready", include_in_schema=False)
async def ready(service: Annotated[Service, Depends(get_service)]) -> Any:
    """Answer 200 if requests are taken now, else 503 with the reason."""
    return StatusResponse(status="ready") if service.status == "ready" else _unavailable(service)


def _unavailable(service: Service) -> Response:
    """Answer as a refused request would be; a probe is none, so it is not counted."""
    return service.refusal().response()


@router.get("/stats", response_model=StatsResponse)
async def stats(
    service: Annotated[Service, Depends(get_service)],
    model: Annotated[str | None, Query(description="Name of the model; default: totals of all.")] = None,
    watch: Annotated[bool, Query(description="Have the engines observe their passes for a minute.")] = False,
) -> Any:
    """Return the engine's newest numbers and the model's facts: of several models, those of all or of one."""
    models = service.models
    chosen = models.only if model is None else models.find(model)
    if watch:
        for each in models.all if chosen is None else [chosen]:
            each.watch()
            await service.watch_other_programs(each)
    replicas = models.replicas() if chosen is None else chosen.replicas()
    admissions = models.num_unfinished if chosen is None else chosen.admission.num_unfinished
    return {
        "status": service.status,
        "uptime_s": time.monotonic() - service.started_s,
        "num_unfinished": admissions,
        "model": None if chosen is None or chosen.generator is None else msgspec.to_builtins(chosen.info),
        "models": [
            {"name": it.name, "status": it.status, "memory_bytes": it.memory_bytes, "num_loads": it.num_loads}
            for it in models.all
        ],
        "replicas": [
            {"state": it.state, "is_slow": it.is_slow, "host": it.host, "activity": it.activity} | _all_fields(it.stats)
            for it in replicas
        ],
        **_all_fields(models.stats() if chosen is None else chosen.stats()),
    }


def _all_fields(stats: EngineStats) -> dict[str, Any]:
    """Return also fields with default values, which messages omit."""
    return {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(stats).items()}


class VersionResponse(BaseModel):
    """Which moeflow answers."""

    version: str


@router.get("/version")
async def get_version() -> VersionResponse:
    """Return the version of moeflow."""
    return VersionResponse(version=version())


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Annotated[Service, Depends(get_service)]) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(service.metrics.exposition(), media_type=EXPOSITION_TYPE)
