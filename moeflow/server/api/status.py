"""`/health`, `/ready`, `/stats`, `/metrics`: how the server is, for orchestrators, the page and Prometheus."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, create_model

from moeflow.engine.client import EngineState
from moeflow.engine.messages import EncoderInfo, EngineStats, LenderStats, ModelInfo, RankStats, SpeculatorStats
from moeflow.server.service import Service, Status, get_service

router = APIRouter(tags=["status"])
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusResponse(BaseModel):
    """One word."""

    status: Status


class HealthResponse(StatusResponse):
    """And how many engines compute."""

    num_replicas: int  # 0 until they are loaded
    num_replicas_ready: int


def _fields(struct: type[msgspec.Struct], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a message's fields as pydantic's, so that the document names them all and neither list can lag."""
    return {field.name: (field.type, ...) for field in msgspec.structs.fields(struct) if field.name not in without}


_PRIVATE = ("path",)  # where the model lies is nobody's business outside
EncoderFacts: Any = create_model("EncoderFacts", **_fields(EncoderInfo))
ModelFacts: Any = create_model(
    "ModelFacts",
    **_fields(ModelInfo, without=_PRIVATE) | {"encoder": (EncoderFacts | None, ...)},  # null: decoder-only
)
RankFacts: Any = create_model("RankFacts", **_fields(RankStats))
LenderFacts: Any = create_model("LenderFacts", **_fields(LenderStats))
SpeculatorFacts: Any = create_model("SpeculatorFacts", **_fields(SpeculatorStats))
_LISTS: Any = {
    "ranks": (list[RankFacts], ...),  # of the processes that share a model; empty if there is one
    "lenders": (list[LenderFacts], ...),  # of memory for experts
    "speculators": (list[SpeculatorFacts], ...),  # that guess tokens
}
ReplicaFacts: Any = create_model(
    "ReplicaFacts",
    state=(EngineState, ...),
    is_slow=(bool, ...),  # it gets no new sequences
    **_fields(EngineStats) | _LISTS,
)
StatsResponse: Any = create_model(
    "StatsResponse",
    status=(Status, ...),
    uptime_s=(float, ...),
    num_unfinished=(int, ...),  # sequences as the queue bound counts them
    model=(ModelFacts | None, ...),  # null until it is loaded
    replicas=(list[ReplicaFacts], ...),  # each of the engines; all else is theirs together
    **_fields(EngineStats) | _LISTS,
)


@router.get("/health", response_model=HealthResponse)
@router.head("/health", include_in_schema=False)
async def health(service: Annotated[Service, Depends(get_service)]) -> Any:
    """Answer 200 as long as the server need not be restarted, else 503.

    It need not while one of its engines computes, or is started anew. If all there are do not answer, that is one
    reason; the server ends them after a while by itself, so whoever watches should be patient.
    """
    if service.status in ("failed", "stalled"):
        return _unavailable(service)
    ready = [replica for replica in service.replicas() if replica.state is EngineState.READY]
    return HealthResponse(status=service.status, num_replicas=len(service.replicas()), num_replicas_ready=len(ready))


@router.get("/ready", response_model=StatusResponse)
@router.head("/ready", include_in_schema=False)
async def ready(service: Annotated[Service, Depends(get_service)]) -> Any:
    """Answer 200 if requests are taken now, else 503 with the reason."""
    return StatusResponse(status="ready") if service.status == "ready" else _unavailable(service)


def _unavailable(service: Service) -> Response:
    """Answer as a refused request would be; a probe is none, so it is not counted."""
    return service.refusal().response()


@router.get("/stats", response_model=StatsResponse)
async def stats(service: Annotated[Service, Depends(get_service)]) -> Any:
    """Return the engine's newest numbers and the model's facts."""
    loaded = service.loaded
    return {
        "status": service.status,
        "uptime_s": time.monotonic() - service.started_s,
        "num_unfinished": service.admission.num_unfinished,
        "model": None if loaded is None else msgspec.to_builtins(loaded.client.model),
        "replicas": [
            {"state": it.state, "is_slow": it.is_slow, **msgspec.to_builtins(it.stats)} for it in service.replicas()
        ],
        **msgspec.to_builtins(service.stats() or EngineStats()),
    }


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Annotated[Service, Depends(get_service)]) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(service.metrics.exposition(), media_type=EXPOSITION_TYPE)
