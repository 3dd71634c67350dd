"""`/stats/requests`: what became of the last requests, each with where its time went and why."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, create_model

from moeflow.kernels.on_demand import on_demand
from moeflow.server.api.schema.token_trees import DraftedPassObject
from moeflow.server.errors import ApiError
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service, get_service
from moeflow.server.stories.access import listed, named
from moeflow.server.stories.phases import Phase
from moeflow.server.stories.reasons import Reason, slow_because
from moeflow.server.stories.seen import Experts, Pass, Seen, seen_of
from moeflow.server.stories.stories import MAX_STORIES
from moeflow.server.stories.story import State, Story, with_queue_known
from moeflow.server.stories.tokens import RoutedToken, RoutedTokens, tokens_of

with on_demand(__name__):
    from moeflow.server.stories import pace

router = APIRouter(tags=["status"])


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a struct's fields as pydantic's, so that the document names them all."""
    return {field.name: (field.type, ...) for field in msgspec.structs.fields(struct)}


PhaseFacts: Any = create_model("PhaseFacts", **_fields(Phase))
ReasonFacts: Any = create_model("ReasonFacts", **_fields(Reason))
PassFacts: Any = create_model("PassFacts", **_fields(Pass))
TouchedExperts: Any = create_model("TouchedExperts", **_fields(Experts))
RoutedTokenFacts: Any = create_model("RoutedTokenFacts", **_fields(RoutedToken))
StoryFacts: Any = create_model("StoryFacts", **_fields(Story) | {"phases": (list[PhaseFacts], ...)})
StoryResponse: Any = create_model(
    "StoryResponse",
    __base__=StoryFacts,
    slow_because=(list[ReasonFacts], ...),
    **_fields(Seen)
    | {
        "passes": (list[PassFacts] | None, ...),
        "experts": (TouchedExperts | None, ...),
        "token_trees": (list[DraftedPassObject] | None, ...),
    },
)
TokensResponse: Any = create_model(
    "TokensResponse", **_fields(RoutedTokens) | {"tokens": (list[RoutedTokenFacts], ...)}
)


class StoriesResponse(BaseModel):
    """The last requests; the one that came last is the first."""

    requests: list[StoryFacts]


@router.get("/stats/requests", response_model=StoriesResponse)
async def list_stories(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    state: Annotated[State | None, Query()] = None,
    model: Annotated[str | None, Query(description="Name of the model; default: all.")] = None,
) -> Any:
    """Return the stories of the running requests, of the last 200 others, and of the last 50 that were refused."""
    name = None if model is None else service.models.find(model).name
    stories = listed(service, request, await service.stories.all())
    chosen = [it for it in stories if state in (None, it.state) and name in (None, it.model)]
    # Without FastAPI's check of 200 stories, which takes longer than all else: the page asks each second.
    return Response(msgspec.json.encode({"requests": chosen}), media_type="application/json")


@router.get("/stats/requests/{request_id:path}/tokens", response_model=TokensResponse)
async def get_tokens(
    request_id: str,
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    sequence: Annotated[int, Query(ge=0, description="Of several sequences of a request: which one.")] = 0,
) -> Any:
    """Return the tokens of a request, prompt and answer, with the experts that routers chose for each.

    Engines know them while somebody watches: see `/stats?watch=true`.
    """
    story = await _find(service, request, request_id)
    return msgspec.to_builtins(await tokens_of(_model_of(service, story), story, sequence))


@router.get("/stats/requests/{request_id:path}", response_model=StoryResponse)
async def get_story(request_id: str, request: Request, service: Annotated[Service, Depends(get_service)]) -> Any:
    """Return the story of one request, by the id in its answer's header `x-request-id`, or by that of its object.

    Engines know passes and experts while somebody watches: see `/stats?watch=true`. Asking for a story is watching.
    """
    story = await _find(service, request, request_id)
    model = _model_of(service, story)
    seen = await seen_of(model, story)
    story = with_queue_known(story, seen.queued_s)
    known = None if model is None or model.generator is None else service.speed_of(model)
    facts = {
        "slow_because": slow_because(story, seen, await pace.pace_of(known, story)),
        **msgspec.structs.asdict(seen),
    }
    return {**msgspec.to_builtins(story), **{name: msgspec.to_builtins(fact) for name, fact in facts.items()}}


def _model_of(service: Service, story: Story) -> ServedModel | None:
    return next((model for model in service.models.all if model.name == story.model), None)


async def _find(service: Service, request: Request, request_id: str) -> Story:
    """Return the newest story with this id. Raises: ApiError 404."""
    story = named(service, request, await service.stories.all(), request_id)
    if story is not None:
        return story
    message = f"None of the running requests and the last {MAX_STORIES} others that you may see has this id"
    raise ApiError(404, "request_not_found", message)
