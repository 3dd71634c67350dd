"""`POST /api/pull`: downloads a model from the hub, with progress as lines of JSON.

An API key is needed, as `guard/admin.py` says.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from moeflow.server.api.ollama.route import OllamaRoute
from moeflow.server.api.openapi import OLLAMA_ERRORS, lines_of
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.errors import ApiError
from moeflow.server.guard.admin import may_change
from moeflow.server.pulls import PullStatus, require_model_name
from moeflow.server.service import Service, get_service
from moeflow.server.sse import NDJSON, EventStream, line

_PING = line({"status": "pulling"})  # in pauses: clients of Ollama skip no line

router = APIRouter(route_class=OllamaRoute, tags=["Ollama"], responses=OLLAMA_ERRORS)


class OllamaPullRequest(StrictModel):
    """The model to pull: its name on the hub, not in Ollama's registry."""

    model: Annotated[str | None, Field(max_length=1000)] = None
    name: Annotated[str | None, Field(max_length=1000)] = None  # the older field
    stream: bool | None = None  # lines of progress; true unless set
    insecure: bool | None = None  # changes nothing: the hub's address is the server's


class OllamaPullLine(BaseModel):
    """Progress, or the end: `success`."""

    status: str
    digest: str | None = None
    total: int | None = None  # bytes
    completed: int | None = None


@router.post(
    "/api/pull",
    dependencies=[Depends(may_change)],
    response_model=OllamaPullLine,
    response_model_exclude_unset=True,
    responses=lines_of(OllamaPullLine),
)
async def pull(body: OllamaPullRequest, service: Annotated[Service, Depends(get_service)]) -> Response | OllamaPullLine:
    """Download a model. A client that leaves does not end it."""
    service.require_open()
    service.pulls.begin(require_model_name(body.model or body.name or ""))
    changes = service.pulls.changes()
    if body.stream is not False:
        return EventStream(_lines(changes), lambda: None, _PING, NDJSON)
    async for status in changes:
        if status.state not in ("running", "done"):
            raise ApiError(500, "pull_failed", _reason(status))
    return OllamaPullLine(status="success")


async def _lines(changes: AsyncIterator[PullStatus]) -> AsyncGenerator[bytes, None]:
    yield line({"status": "pulling manifest"})
    async for status in changes:
        if status.state == "done":
            yield line({"status": "success"})
        elif status.state != "running":
            yield line({"error": _reason(status)})
        elif status.total_bytes:
            yield line(_progress(status))


def _progress(status: PullStatus) -> dict[str, Any]:
    """Return one line for all files: clients show one bar for each digest."""
    return {
        "status": f"pulling {status.name}",
        "digest": status.name,
        "total": status.total_bytes,
        "completed": status.done_bytes,
    }


def _reason(status: PullStatus) -> str:
    return status.error or f"the pull of {status.name} was cancelled; its bytes are kept"
