"""`/v1/responses`: items in, items out, in OpenAI's newer API; and responses that were stored."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import TypeAdapter

from moeflow.core.errors import ContextLengthError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.conversation.conversation import start_conversation
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.paging import After, page
from moeflow.server.api.responses.hosted_kinds import HostedItem, HostedTool
from moeflow.server.api.responses.output_items import ListedItem
from moeflow.server.api.responses.response_object import (
    RESPONSE_EVENTS,
    DeletedResponse,
    InputTokens,
    ResponseItemList,
    ResponseObject,
)
from moeflow.server.api.responses.response_replay import replayed_events
from moeflow.server.api.responses.response_request import InputTokensRequest, ResponseInput, ResponseRequest
from moeflow.server.api.responses.response_tools import dumped_tools
from moeflow.server.api.responses.response_writer import ResponseWriter, too_long_events
from moeflow.server.api.responses.tool_items import Item
from moeflow.server.api.schema.sampling_fields import IGNORED
from moeflow.server.api.stream_dialect import RESPONSES
from moeflow.server.errors import ApiError, PromptTooLongError
from moeflow.server.guard.body import JsonRoute
from moeflow.server.guard.strict_json import MAX_CONTAINERS
from moeflow.server.request_log import client_of, record_of
from moeflow.server.service import Service, get_service

Stored = TypeVar("Stored")
_ITEM_BYTES: Final = 128  # a stored item has at least about this size
router = APIRouter(route_class=JsonRoute)
_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_listed: TypeAdapter[list[ListedItem]] = TypeAdapter(list[ListedItem])


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=stream_of(*RESPONSE_EVENTS, is_typed=True),
    tags=["OpenAI"],
)
async def create_response(
    body: ResponseRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Answer, by a message, by calls of functions, or by both."""
    if service.config.log_prompts:
        history = await _history(service, body)
        record_of(request.scope).prompt = body.conversation(history, body.offered_tools(history)).messages

    def failure(error: ApiError) -> bytes:
        return _too_long(service, body, error) if isinstance(error, PromptTooLongError) else RESPONSES.failure(error)

    starting = start_response(service, body, client=client_of(request))
    try:
        return await respond(request, starting, replace(RESPONSES, failure=failure), is_streamed=bool(body.stream))
    except ContextLengthError as error:
        if not body.stream:
            raise
        too_long = record_of(request.scope).error = PromptTooLongError(error)
        service.metrics.count_refusal(too_long)
        return Response(failure(too_long), media_type=RESPONSES.media_type)


def _too_long(service: Service, body: ResponseRequest, error: PromptTooLongError) -> bytes:
    """Return the events of a response whose prompt the context cannot hold."""
    served = service.models.find(body.model)
    defaults = TokenChoice() if served.generator is None else served.info.sampling_defaults
    choice = body.sampling_params(max_tokens=body.max_output_tokens).choice(defaults)
    return too_long_events(_head(f"resp_{uuid.uuid4().hex}", served.name, body, choice), error)


async def start_response(
    service: Service, body: ResponseRequest, *, is_batch: bool = False, client: str | None = None
) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed. Those of jobs are not stored.

    Raises: ApiError, RequestError.
    """
    response_id = f"resp_{uuid.uuid4().hex}"
    history = await _history(service, body)
    tools = body.offered_tools(history)
    asked = body.conversation(history, tools)
    is_stored = body.store is not False and not is_batch
    items = await _encoded_items(service, body) if is_stored else b""
    served = await service.require_model(body.model, is_batch=is_batch)  # last: while others wait, it may be unloaded
    head = _head(response_id, served.name, body, asked.sampling.choice(served.info.sampling_defaults))
    generation, form = await start_conversation(service, served, response_id, asked, is_batch=is_batch, client=client)

    def store(response: dict[str, Any]) -> None:
        if is_stored:
            service.conversations.put(response, items, body.previous_response_id)

    writer = ResponseWriter(generation, form, head, store, called=tools.called, seals_reasoning=body.seals_reasoning)
    return Answer(generation, writer)


@router.post("/v1/responses/input_tokens", tags=["OpenAI"])
async def count_input_tokens(
    body: InputTokensRequest, service: Annotated[Service, Depends(get_service)]
) -> InputTokens:
    """Count the tokens of a conversation, tools and stored responses before it included."""
    async with service.using(body.model) as model:
        history = await _history(service, body)
        asked = body.asked(history, body.offered_tools(history), SamplingParams())
        prompt = await model.loaded.encode_chat(asked.messages, asked.tools.tools, asked.variables)
    return InputTokens(object="response.input_tokens", input_tokens=len(prompt.token_ids))


@router.get(
    "/v1/responses/{response_id}",
    response_model=ResponseObject,
    responses=stream_of(*RESPONSE_EVENTS, is_typed=True),
    tags=["OpenAI"],
)
async def get_response(
    response_id: str,
    service: Annotated[Service, Depends(get_service)],
    stream: Annotated[bool, Query(description="As the events that it came with.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, le=2**31, description="Of a stream: its events behind this one.")
    ] = None,
    include: Annotated[
        list[str] | None, Query(alias="include[]", description="Accepted; a stored response comes whole.")
    ] = None,
    include_obfuscation: Annotated[bool | None, Query(description=IGNORED)] = None,
) -> Response | dict[str, Any]:
    """Return a stored response."""
    response = _found(service.responses.response(response_id), response_id)
    if not stream:
        return response
    events = replayed_events(response, -1 if starting_after is None else starting_after)
    return Response(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@router.delete("/v1/responses/{response_id}", tags=["OpenAI"])
async def delete_response(response_id: str, service: Annotated[Service, Depends(get_service)]) -> DeletedResponse:
    """Forget a stored response; none can follow it any more."""
    _found(service.responses.delete(response_id) or None, response_id)
    return DeletedResponse(id=response_id, object="response", deleted=True)


@router.get("/v1/responses/{response_id}/input_items", response_model=ResponseItemList, tags=["OpenAI"])
async def list_input_items(
    response_id: str,
    service: Annotated[Service, Depends(get_service)],
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List what went into a stored response, without what went before it."""
    items = _found(service.responses.items(response_id), response_id)
    shown = page(items if order == "asc" else items[::-1], after, limit, kind="item", id_of=itemgetter("id"))
    return shown | {"data": _listed.validate_python(shown["data"])}


def _found(stored: Stored | None, response_id: str) -> Stored:
    """Raises: ApiError 404."""
    if stored is None:
        message = f"There is no response {response_id[:80]!r}: it was not stored, or is no longer kept"
        raise ApiError(404, "response_not_found", message)
    return stored


async def _history(service: Service, body: ResponseInput) -> list[Item]:
    """Return the items before a request's own. Raises: ApiError 404 (one is missing), 400 (too many)."""
    if body.previous_response_id is None:
        return []
    history = await service.conversations.history(body.previous_response_id)
    if history is None:
        message = (
            f"The conversation up to {body.previous_response_id[:80]!r} is not, or no longer, kept here in full; "
            "send it as input"
        )
        raise ApiError(404, "previous_response_not_found", message, param="previous_response_id")
    max_bytes = service.large_bodies.max_body_bytes
    if history.num_bytes > max_bytes or history.num_containers > MAX_CONTAINERS:
        message = (
            f"The conversation up to {body.previous_response_id[:80]!r} has {history.num_bytes} bytes and "
            f"{history.num_containers} lists and objects; one request reads at most {max_bytes} bytes and "
            f"{MAX_CONTAINERS} lists and objects. Send the part that matters as input"
        )
        raise ApiError(400, "history_too_large", message, param="previous_response_id")
    return await service.large_bodies.read(history.num_bytes, lambda: _items.validate_python(history.items()))


async def _encoded_items(service: Service, body: ResponseInput) -> bytes:
    """Return a request's items as they are stored: JSON."""
    items = [item for item in body.items() if not isinstance(item, HostedItem)]
    return await service.large_bodies.read(
        len(items) * _ITEM_BYTES, lambda: msgspec.json.encode([item.stored() for item in items])
    )


def _head(response_id: str, model: str, body: ResponseRequest, choice: TokenChoice) -> dict[str, Any]:
    """Return what a response says of its request."""
    given = body.model_dump(by_alias=True, exclude_unset=True, include={"text", "tool_choice", "reasoning"})
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None} | _reasoning(given.get("reasoning") or {}),
        "service_tier": "default",
        "temperature": choice.temperature,
        "text": {"format": {"type": "text"}, **_without_none(given.get("text") or {})},
        "tool_choice": _choice(given.get("tool_choice")),
        "tools": dumped_tools([tool for tool in body.tools or () if not isinstance(tool, HostedTool)]),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": choice.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _reasoning(reasoning: dict[str, Any]) -> dict[str, Any]:
    """Return `reasoning` as responses repeat it: without a summary, the field is null."""
    no_summary = ("summary", "generate_summary")
    return {name: None if name in no_summary and value == "none" else value for name, value in reasoning.items()}


def _choice(choice: Any) -> Any:
    """Return `tool_choice` as responses repeat it: without the namespace of a tool, which clients do not expect."""
    if not isinstance(choice, dict):
        return choice or "auto"
    return {name: value for name, value in choice.items() if name != "namespace"}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
