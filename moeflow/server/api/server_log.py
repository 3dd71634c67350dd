"""`GET /stats/log`: the newest lines of the server's log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel

from moeflow.server.guard.admin import may_read
from moeflow.server.log_ring import MAX_LINES, LogLine, log_ring

router = APIRouter(tags=["status"])


class LogLineAnswer(BaseModel):
    """One line of the log. Long texts are cut."""

    number: int  # a later line has a higher one, also after a restart of the server
    time_s: float  # since the epoch
    level: str
    logger: str
    message: str
    fields: dict[str, Any]  # of a request: id, status, times and so on; prompts only with --log-prompts
    exception: str  # a traceback, or ""


class LogLines(BaseModel):
    """Lines after a number, oldest first."""

    lines: list[LogLineAnswer]
    newest: int  # number of the last line; the next request has it as `after`
    is_complete: bool  # false: lines after the given number are no longer kept


@router.get("/stats/log", dependencies=[Depends(may_read)])
async def read_log(
    after: Annotated[int, Query(ge=0, description="Number of the last line that the client has.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES, description="Only so many of the newest lines.")] = MAX_LINES,
) -> LogLines:
    """Return the newest log lines of the server's processes for HTTP."""
    ring = log_ring()
    found = ring.since(after)
    return LogLines(
        lines=[_answer(line) for line in found[-limit:]],
        newest=found[-1].number if found else after,
        is_complete=len(found) <= limit and (after == 0 or ring.has_all_since(after)),
    )


def _answer(line: LogLine) -> LogLineAnswer:
    return LogLineAnswer(
        number=line.number,
        time_s=line.time_s,
        level=line.level,
        logger=line.logger,
        message=line.message,
        fields=line.fields,
        exception=line.exception,
    )
