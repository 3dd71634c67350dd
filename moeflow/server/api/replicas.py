"""`/replicas`: the number of engines that a Ray cluster runs for this server, and the processes that answer HTTP.

To change the number needs an API key, as `guard/admin.py` says.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from moeflow.core.errors import ConfigError
from moeflow.engine.client import EngineClient, EngineState
from moeflow.processes.supervisor import Supervisor
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.errors import ApiError
from moeflow.server.guard.admin import change_refusal, may_change
from moeflow.server.guard.body import JsonRoute
from moeflow.server.service import Service, get_service

MOST_REPLICAS = 4096
_OWN_PROCESS = "this server has one engine, in its own process"

router = APIRouter(route_class=JsonRoute)


class ScaleRequest(StrictModel):
    """The number of engines to have."""

    model: str | None = None
    num_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)]


class ScaleResponse(BaseModel):
    """The number of engines before and after; new ones may not be ready."""

    num_replicas_before: int
    num_replicas: int


class FrontAnswer(BaseModel):
    """A process that answers HTTP before the same engines."""

    number: int  # from 1 on
    is_ready: bool  # it takes requests
    stopped_s: float  # that it has not run for; 0: it runs


class Replicas(BaseModel):
    """The engines of a model, and the fronts of the server."""

    num_replicas: int  # 0: it is not loaded
    scale_refusal: str  # why their number cannot be changed here, with the remedy; ""
    fronts: list[FrontAnswer]  # none: the server's own process answers


@router.get("/replicas", tags=["status"])
async def get_replicas(
    service: Annotated[Service, Depends(get_service)],
    model: Annotated[str | None, Query(description="Name of the model; default: the first one.")] = None,
) -> Replicas:
    """Return the number of engines, and whether it can be changed."""
    client = _client_of(service, model)
    return Replicas(
        num_replicas=0 if client is None else _count(client),
        scale_refusal=_fixed_reason(client) or change_refusal(service.config),
        fronts=[FrontAnswer(**asdict(front)) for front in service.fronts()],
    )


def _client_of(service: Service, model: str | None) -> EngineClient | None:
    generator = service.models.find(model).generator
    return None if generator is None else generator.client


def _count(client: EngineClient) -> int:
    return sum(replica.state is not EngineState.DRAINING for replica in client.replicas())


def _fixed_reason(client: EngineClient | None) -> str:
    if client is None:
        return "the model is not loaded"
    return client.fixed_reason if isinstance(client, Supervisor) else _OWN_PROCESS


@router.post("/replicas", response_model=ScaleResponse, tags=["status"], dependencies=[Depends(may_change)])
async def scale(body: ScaleRequest, service: Annotated[Service, Depends(get_service)]) -> ScaleResponse:
    """Start further engines on the nodes of the server's Ray cluster, or end some. Running requests continue."""
    async with service.using(body.model) as model:
        client = model.loaded.client
        before = _count(client)
        if not isinstance(client, Supervisor):
            raise ApiError(409, "replicas_fixed", _OWN_PROCESS)
        try:
            client.scale(body.num_replicas)
        except ConfigError as error:
            raise ApiError(409, "replicas_fixed", str(error)) from None
        return ScaleResponse(num_replicas_before=before, num_replicas=body.num_replicas)
