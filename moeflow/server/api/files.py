"""`/v1/files`: inputs of batch jobs to upload, and their results to fetch."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.datastructures import FormData
from starlette.responses import FileResponse

from moeflow.server.api.file_schema import (
    LEAST_LIFETIME_S,
    MOST_LIFETIME_S,
    UPLOAD_FORM,
    FileDeleted,
    FileList,
    FileObject,
)
from moeflow.server.api.paging import page
from moeflow.server.errors import ApiError
from moeflow.server.guard.upload import UploadRequest, UploadRoute
from moeflow.server.jobs.data_folder import Jobs, get_jobs, writing
from moeflow.server.jobs.file_store import StoredFile

router = APIRouter(route_class=UploadRoute, tags=["OpenAI"])
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


@router.post("/v1/files", response_model=FileObject, openapi_extra={"requestBody": UPLOAD_FORM})
async def upload_file(request: Request, jobs: Annotated[Jobs, Depends(get_jobs)]) -> Any:
    """Keep a file."""
    assert isinstance(request, UploadRequest), "its route sees to that"
    with writing():
        target = jobs.files.place()
        try:
            name, form = await request.upload(target)
            purpose, lifetime_s = _check_form(form)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        name = name.replace("\\", "/").rpartition("/")[2][:255].strip(". ") or "upload"
        stored = await asyncio.to_thread(jobs.files.add, target, name, purpose, lifetime_s)
    return msgspec.to_builtins(stored)


def _check_form(form: FormData) -> tuple[str, int]:
    """Return purpose and lifetime in seconds."""
    for name in form:
        if name not in _FIELDS:
            raise ApiError(400, "invalid_value", f"unknown field {name[:80]!r}: leave it out", param=name)
    if form.get("purpose") != "batch":
        raise ApiError(400, "invalid_value", 'purpose: must be "batch": files serve nothing else here', param="purpose")
    seconds = form.get("expires_after[seconds]")
    if form.get("expires_after[anchor]", "created_at") != "created_at":
        raise ApiError(400, "invalid_value", 'expires_after: anchor must be "created_at"', param="expires_after")
    if seconds is None:
        return "batch", MOST_LIFETIME_S
    text = str(seconds)
    if not (text.isdecimal() and len(text) < 10 and LEAST_LIFETIME_S <= int(text) <= MOST_LIFETIME_S):
        message = f"expires_after: seconds must be a whole number from {LEAST_LIFETIME_S} to {MOST_LIFETIME_S}"
        raise ApiError(400, "invalid_value", message, param="expires_after")
    return "batch", int(text)


@router.get("/v1/files", response_model=FileList)
async def list_files(
    jobs: Annotated[Jobs, Depends(get_jobs)],
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Any:
    """List the files, newest first unless asked otherwise."""
    files = [file for file in jobs.files.all() if purpose in (None, file.purpose)]
    return page(files if order == "desc" else files[::-1], after, limit)


@router.get("/v1/files/{file_id}", response_model=FileObject)
async def get_file(file_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> Any:
    """Describe a file."""
    return msgspec.to_builtins(require_file(jobs, file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def get_content(file_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> FileResponse:
    """Send a file."""
    file = require_file(jobs, file_id)
    return FileResponse(jobs.files.path(file.id), media_type="application/octet-stream", filename=file.filename)


@router.delete("/v1/files/{file_id}", response_model=FileDeleted)
async def delete_file(file_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> FileDeleted:
    """Remove a file for good."""
    file = require_file(jobs, file_id)
    if jobs.batches.needs(file.id):
        raise ApiError(409, "file_in_use", f"{file.id} belongs to an unfinished batch: cancel that first")
    with writing():
        jobs.files.delete(file.id)
    return FileDeleted(id=file.id)


def require_file(jobs: Jobs, file_id: str, param: str | None = None) -> StoredFile:
    """Return a file. Raises: ApiError 404."""
    file = jobs.files.find(file_id)
    if file is None:
        raise ApiError(404, "file_not_found", f"There is no file {file_id[:80]!r}", param=param)
    return file
