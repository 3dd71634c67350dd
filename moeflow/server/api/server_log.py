"""`GET /stats/log`: the newest lines of the server's log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from moeflow.server.guard.admin import may_read
from moeflow.server.log_ring import MAX_LINES, LogLine, log_ring
from moeflow.server.request_log import SentKey, record_of

router = APIRouter(tags=["status"])


class LogLineAnswer(BaseModel):
    """One line of the log. Long texts are cut."""

    number: int  # a later line has a higher one, also after a restart of the server
    time_s: float  # since the epoch
    level: str
    logger: str
    message: str
    fields: dict[str, Any]  # of a request: id, status, times and so on; own prompts only with --log-prompts
    exception: str  # a traceback, or ""


class LogLines(BaseModel):
    """Lines after a number, oldest first."""

    lines: list[LogLineAnswer]
    newest: int  # number of the last line; the next request has it as `after`
    is_complete: bool  # false: lines after the given number are no longer kept


@router.get("/stats/log", dependencies=[Depends(may_read)])
async def read_log(
    request: Request,
    after: Annotated[int, Query(ge=0, description="Number of the last line that the client has.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES, description="Only so many of the newest lines.")] = MAX_LINES,
) -> LogLines:
    """Return the newest log lines of the server's processes for HTTP. A key gets no prompts of other keys."""
    ring, asker = log_ring(), record_of(request.scope).account
    found = ring.since(after)
    return LogLines(
        lines=[_answer(line, asker) for line in found[-limit:]],
        newest=found[-1].number if found else after,
        is_complete=len(found) <= limit and (after == 0 or ring.has_all_since(after)),
    )


def _answer(line: LogLine, asker: SentKey | None) -> LogLineAnswer:
    """Return a line for a key; None: there are no keys, and all lines are for this machine."""
    is_own = asker is None or line.fields.get("key") == asker.name
    return LogLineAnswer(
        number=line.number,
        time_s=line.time_s,
        level=line.level,
        logger=line.logger,
        message=line.message,
        fields={name: value for name, value in line.fields.items() if is_own or name != "prompt"},
        exception=line.exception,
    )
