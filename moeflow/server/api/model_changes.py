"""`/models/load`, `/models/unload`, `/models/pull`, `/models/local`: the models that are loaded, and those on the disk.

Each change needs an API key, and comes from the server's own page or a program (`guard/admin.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from moeflow.models.downloaded import DownloadedModel
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.downloads import read_downloads, served_or_downloaded
from moeflow.server.errors import ApiError
from moeflow.server.guard.admin import change_refusal, may_change, may_read
from moeflow.server.guard.body import JsonRoute
from moeflow.server.pulls import PullState, PullStatus, require_model_name
from moeflow.server.served_model import ModelStatus, ServedModel
from moeflow.server.service import Service, get_service

MAX_NAME = 1000  # characters

router = APIRouter(route_class=JsonRoute, tags=["models"])
_CHANGES = [Depends(may_change)]
_READS = [Depends(may_read)]
_Service = Annotated[Service, Depends(get_service)]


class ModelChange(StrictModel):
    """The model to load, to unload or to pull."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class ChangedModel(BaseModel):
    """A model after a change."""

    model: str  # the name that requests give
    status: ModelStatus


class PullAnswer(BaseModel):
    """A pull: the one that runs, else the last one."""

    model: str
    state: PullState
    done_bytes: int  # downloaded now or before
    total_bytes: int  # 0: not known yet
    bytes_per_s: float  # over the last seconds
    left_s: float | None  # at this speed; null: not known
    error: str  # why it failed, or ""


class LastPull(BaseModel):
    """The pull of this server."""

    pull: PullAnswer | None  # null: there was none since the server started


class LocalModel(BaseModel):
    """A downloaded model."""

    name: str
    format: str
    size_bytes: int
    family: str | None
    problem: str | None  # why it cannot be run; null: it can
    last_used_s: float  # since the epoch, as exactly as the file system notes it
    served_as: str | None  # the name that requests give; null: it is not served


class LocalModels(LastPull):
    """The downloaded models of this machine, and the free space."""

    models: list[LocalModel]
    unfinished_bytes: dict[str, int]  # of each repository with an interrupted pull
    used_bytes: int  # by these models and unfinished pulls
    free_bytes: int  # of the disk
    change_refusal: str  # why nothing can be changed here, with the remedy; ""
    load_refusal: str  # why no model can be loaded or unloaded, likewise


@router.post("/models/load", dependencies=_CHANGES)
async def load_model(body: ModelChange, service: _Service) -> ChangedModel:
    """Load a served model, or a downloaded one, which is served from then on. Returns once it is loaded."""
    service.require_open()
    service.models.require_several()
    found = await served_or_downloaded(service.models, body.model)
    return _changed(await service.require_model(found.name))


@router.post("/models/unload", dependencies=_CHANGES)
async def unload_model(body: ModelChange, service: _Service) -> ChangedModel:
    """Unload a model; the next request for it loads it again."""
    service.require_open()
    service.models.require_several()
    model = service.models.find(body.model)
    if model.is_loading or not model.is_idle:
        how = "is being loaded" if model.is_loading else "has running requests"
        raise ApiError(409, "model_busy", f"{model.name} {how}; try again when that has ended", param="model")
    service.models.unload(model)
    return _changed(model)


@router.post("/models/pull", dependencies=_CHANGES)
async def pull_model(body: ModelChange, service: _Service) -> PullAnswer:
    """Begin to download a model from the hub, or resume it. `GET /models/pull` has the progress."""
    service.require_open()
    return pull_answer(service.pulls.begin(require_model_name(body.model)))


@router.get("/models/pull", dependencies=_READS)
async def get_pull(service: _Service) -> LastPull:
    """Return how far the pull is, or how the last one ended."""
    return LastPull(pull=_last_pull(service))


@router.post("/models/pull/cancel", dependencies=_CHANGES)
async def cancel_pull(service: _Service) -> LastPull:
    """Cancel the pull, if one runs. Downloaded bytes stay for the next pull of that model."""
    await service.pulls.cancel()
    return LastPull(pull=_last_pull(service))


@router.get("/models/local", dependencies=_READS)
async def local_models(service: _Service) -> LocalModels:
    """List the downloaded models of this machine, also those of other tools that use the hub's cache."""
    found = await asyncio.to_thread(read_downloads)
    served = {it.source.path: it.name for it in service.models.all if it.source is not None}
    return LocalModels(
        pull=_last_pull(service),
        models=[_local(model, served.get(model.path)) for model in found.models],
        unfinished_bytes=found.unfinished_bytes,
        used_bytes=sum(model.size_bytes for model in found.models) + sum(found.unfinished_bytes.values()),
        free_bytes=found.free_bytes,
        change_refusal=change_refusal(service.config),
        load_refusal=service.models.fixed_reason,
    )


def _changed(model: ServedModel) -> ChangedModel:
    return ChangedModel(model=model.name, status=model.status)


def _last_pull(service: Service) -> PullAnswer | None:
    return None if service.pulls.status is None else pull_answer(service.pulls.status)


def pull_answer(status: PullStatus) -> PullAnswer:
    """Return a pull's status as clients see it."""
    fields = asdict(status)
    return PullAnswer(model=fields.pop("name"), left_s=status.left_s, **fields)


def _local(model: DownloadedModel, served_as: str | None) -> LocalModel:
    fields = asdict(model)
    path, problem = fields.pop("path"), fields.pop("problem")
    del fields["is_supported"]
    return LocalModel(**fields, problem=problem and problem.replace(path, model.name), served_as=served_as)
