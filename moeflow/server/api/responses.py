"""`POST /v1/responses`: items in, items out, in OpenAI's newer API."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.core.sampling_params import SamplingParams
from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.conversation import start_conversation
from moeflow.server.api.models import served_model
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.response_writer import ResponseWriter
from moeflow.server.api.schema.response_object import RESPONSE_EVENTS, ResponseObject
from moeflow.server.api.schema.response_request import ResponseRequest
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


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
    record_of(request.scope).prompt = body.conversation().messages if service.config.log_prompts else None
    return await respond(request, await start_response(service, body), is_streamed=bool(body.stream))


async def start_response(service: Service, body: ResponseRequest, *, is_batch: bool = False) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    Raises: ApiError, RequestError.
    """
    model = served_model(service, body.model)
    response_id = f"resp_{uuid.uuid4().hex}"
    asked = body.conversation()
    generation, form = await start_conversation(service, response_id, asked, is_batch=is_batch)
    return Answer(generation, ResponseWriter(generation, form, _head(response_id, model.name, body, asked.sampling)))


def _head(response_id: str, model: str, body: ResponseRequest, sampling: SamplingParams) -> dict[str, Any]:
    """Return what a response says of its request."""
    given = body.model_dump(by_alias=True, exclude_unset=True, include={"text", "tool_choice", "tools", "reasoning"})
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
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **_without_none(given.get("text") or {})},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
