"""`/v1/files`: inputs of batch jobs to upload, and their results to fetch."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.datastructures import FormData
from starlette.responses import FileResponse

from moeflow.server.api.paging import After, page
from moeflow.server.api.schema.file import UPLOAD_BODY, FileDeleted, FileList, FileObject, UploadForm
from moeflow.server.errors import ApiError, from_pydantic
from moeflow.server.guard.upload import UploadRequest, UploadRoute
from moeflow.server.jobs.data_folder import Jobs, get_jobs, writing

router = APIRouter(route_class=UploadRoute, tags=["OpenAI"])


@router.post("/v1/files", openapi_extra={"requestBody": UPLOAD_BODY})
async def upload_file(request: Request, jobs: Annotated[Jobs, Depends(get_jobs)]) -> FileObject:
    """Keep a file."""
    assert isinstance(request, UploadRequest), "its route sees to that"
    with writing(), jobs.files.incoming() as incoming:
        name, form = await request.upload(incoming)
        fields = _check_form(form)
        name = name.replace("\\", "/").rpartition("/")[2][:255].strip(". ") or "upload"
        stored = await asyncio.to_thread(jobs.files.add, incoming, name, fields.purpose, fields.lifetime_s)
    return stored


def _check_form(form: FormData) -> UploadForm:
    """Return the form's fields. Raises: ApiError 400."""
    try:
        return UploadForm.model_validate(dict(form))
    except ValidationError as error:
        raise from_pydantic(error) from None


@router.get("/v1/files", response_model=FileList)
async def list_files(
    jobs: Annotated[Jobs, Depends(get_jobs)],
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Any:
    """List the files, newest first unless asked otherwise."""
    files = [file for file in jobs.files.all() if purpose in (None, file.purpose)]
    return page(files if order == "desc" else files[::-1], after, limit, kind="file")


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> FileObject:
    """Describe a file."""
    return require_file(jobs, file_id)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def get_content(file_id: str, jobs: Annotated[Jobs, Depends(get_jobs)]) -> FileResponse:
    """Send a file."""
    file = require_file(jobs, file_id)
    if not jobs.files.path(file.id).is_file():
        raise ApiError(404, "file_not_found", f"The contents of {file.id} are gone from the server's disk")
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


def require_file(jobs: Jobs, file_id: str, param: str | None = None) -> FileObject:
    """Return a file. Raises: ApiError 404."""
    file = jobs.files.find(file_id)
    if file is None:
        raise ApiError(404, "file_not_found", f"There is no file {file_id[:80]!r}", param=param)
    return file
