"""`POST /replicas`: change the number of engines that a Ray cluster runs for this server."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from moeflow.core.errors import ConfigError
from moeflow.engine.client import EngineState
from moeflow.processes.supervisor import Supervisor
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.errors import ApiError
from moeflow.server.guard.body import JsonRoute
from moeflow.server.service import Service, get_service

MOST_REPLICAS = 4096

router = APIRouter(route_class=JsonRoute)


class ScaleRequest(StrictModel):
    """The number of engines to have."""

    model: str | None = None
    num_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)]


class ScaleResponse(BaseModel):
    """The number of engines before and after; new ones may not be ready."""

    num_replicas_before: int
    num_replicas: int


@router.post("/replicas", response_model=ScaleResponse, tags=["status"])
async def scale(body: ScaleRequest, service: Annotated[Service, Depends(get_service)]) -> ScaleResponse:
    """Start further engines on the nodes of the server's Ray cluster, or end some. Running requests continue."""
    async with service.using(body.model) as model:
        client = model.loaded.client
        before = sum(replica.state is not EngineState.DRAINING for replica in client.replicas())
        if not isinstance(client, Supervisor):
            raise ApiError(409, "replicas_fixed", "this server has one engine, in its own process")
        try:
            client.scale(body.num_replicas)
        except ConfigError as error:
            raise ApiError(409, "replicas_fixed", str(error)) from None
        return ScaleResponse(num_replicas_before=before, num_replicas=body.num_replicas)
