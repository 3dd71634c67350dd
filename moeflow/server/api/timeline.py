"""`GET /stats/timeline`: which lane of each engine did what in the last passes. Engines record while somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from moeflow.core.observation import TimelineQuestion, TimelineSight
from moeflow.engine.client import ReplicaStatus
from moeflow.pipeline.runtime.perfetto import Event, Process, events_of
from moeflow.pipeline.runtime.recording import Recording
from moeflow.server.errors import ApiError
from moeflow.server.service import Service, get_service
from moeflow.server.stories.access import may_see_ids

router = APIRouter(tags=["status"])

MAX_PASSES: Final = 64  # as many as an engine keeps
_BEGUN: Final = "recording has begun: ask again after the next pass"


class TimelineFacts(BaseModel):
    """What the events are of."""

    model: str
    started_s: float  # Unix time at which the events' time begins; 0: there are none
    num_passes: int  # of the engine that has the most
    note: str  # why there are no passes; empty: there are some


class TimelineResponse(BaseModel):
    """Events in the "Trace Event Format", which ui.perfetto.dev opens."""

    displayTimeUnit: str
    otherData: TimelineFacts
    traceEvents: list[dict[str, Any]]  # times in microseconds; waits have the category "blocked"


@router.get("/stats/timeline", response_model=TimelineResponse)
async def timeline(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    passes: Annotated[int, Query(ge=1, le=MAX_PASSES, description="The last passes of each engine, at most.")] = 8,
    model: Annotated[str | None, Query(description="Name of the model; default: the first.")] = None,
) -> Response:
    """Return which lane of each engine did what in its last passes, as Perfetto's JSON.

    Engines record from the first question until a minute after the last one, so the first answer may be empty. Each
    engine is a process, each of its lanes a thread.
    """
    chosen = service.models.find(model)
    if chosen.generator is None:
        raise chosen.refusal()
    answers = await chosen.look(TimelineQuestion(passes))
    sights = {place: sight for place, sight in answers.items() if isinstance(sight, TimelineSight)}
    if not sights:
        message = "No engine has answered within two seconds: a pass takes longer, or the engine has ended; try again"
        raise ApiError(503, "engine_busy", message, headers={"Retry-After": "1"})
    has_ids = may_see_ids(service, request)
    content = await asyncio.to_thread(_content, chosen.name, sights, chosen.replicas(), has_ids=has_ids)
    return Response(content, media_type="application/json")


def _content(
    model: str, sights: Mapping[int, TimelineSight], replicas: Sequence[ReplicaStatus], *, has_ids: bool
) -> bytes:
    decoder = msgspec.msgpack.Decoder(Recording)
    recordings = {place: decoder.decode(sight.recording) for place, sight in sights.items()}
    named = [
        (_name(place, replicas) + (f", rank {rank}" if rank else ""), each)
        for place, recording in recordings.items()
        for rank, each in enumerate([recording, *recording.ranks])
    ]
    processes = [Process(each.to_trace(), number, name, each.clock_ns) for number, (name, each) in enumerate(named, 1)]
    num_passes = max(recording.num_passes for recording in recordings.values())
    origin_ns, events = events_of(processes if num_passes else ())
    facts = {
        "model": model,
        "started_s": origin_ns / 1e9,
        "num_passes": num_passes,
        "note": "" if num_passes else _BEGUN,
    }
    shown = list(events if has_ids else map(_without_ids, events))
    return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": shown})


def _without_ids(event: Event) -> Event:
    """Return an event without the ids of a pass's requests."""
    if "requests" not in event.get("args", {}):
        return event
    return {**event, "args": {name: value for name, value in event["args"].items() if name != "requests"}}


def _name(place: int, replicas: Sequence[ReplicaStatus]) -> str:
    host = replicas[place].host if place < len(replicas) else ""
    return f"engine {place}" + (f" on {host}" if host else "")
