"""`/v1/batches`: jobs that answer a file of requests with batch priority."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from moeflow.server.api.files import require_file
from moeflow.server.api.paging import After, page
from moeflow.server.api.schema.batch import BatchList, BatchObject, BatchRequest
from moeflow.server.errors import ApiError
from moeflow.server.guard.body import JsonRoute
from moeflow.server.jobs.batch_store import FINAL
from moeflow.server.jobs.data_folder import Jobs, get_jobs, writing
from moeflow.server.jobs.lines import first_model_name
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post("/v1/batches")
async def create_batch(
    body: BatchRequest,
    service: Annotated[Service, Depends(get_service)],
    jobs: Annotated[Jobs, Depends(get_jobs)],
) -> BatchObject:
    """Begin a job. Its input is checked first; the job's state shows the result."""
    service.require_open()
    if service.models.only is not None:
        await service.require_model(None)
    file = require_file(jobs, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        message = f"{file.id} was not uploaded as the input of a batch"
        raise ApiError(400, "invalid_value", message, param="input_file_id")
    model = await asyncio.to_thread(_model_of, service, jobs.files.path(file.id))
    expiry = body.output_expires_after
    with writing():
        batch = jobs.batches.create(
            endpoint=body.endpoint,
            model=model.name,
            input_file_id=file.id,
            metadata=body.metadata,
            output_lifetime_s=None if expiry is None else expiry.seconds,
        )
    jobs.worker.wake()
    return batch


@router.get("/v1/batches", response_model=BatchList)
async def list_batches(
    jobs: Annotated[Jobs, Depends(get_jobs)],
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Any:
    """List the jobs, newest first."""
    return page(jobs.batches.all(), after, limit, kind="batch")


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> BatchObject:
    """Return how far a job is."""
    return _require_batch(jobs, batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> BatchObject:
    """Cancel a job; results so far can be downloaded."""
    batch = _require_batch(jobs, batch_id)
    if batch.status in FINAL:
        raise ApiError(409, "batch_finished", f"{batch.id} is {batch.status} already")
    with writing():
        jobs.worker.cancel(batch)
    return batch


def _model_of(service: Service, source: Path) -> ServedModel:
    """Return the model that a job's first request names. Raises: ApiError 404 if several are served, and not that."""
    if service.models.only is not None:
        return service.models.only  # a request for another one is refused by itself
    return service.models.find(first_model_name(source, service.config.max_body_bytes))


def _require_batch(jobs: Jobs, batch_id: str) -> BatchObject:
    """Return a job. Raises: ApiError 404."""
    batch = jobs.batches.find(batch_id)
    if batch is None:
        raise ApiError(404, "batch_not_found", f"There is no batch {batch_id[:80]!r}")
    return batch
