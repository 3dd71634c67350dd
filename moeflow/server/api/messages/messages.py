"""`POST /v1/messages`: a conversation in, its next message out, in Anthropic's API; and how long a conversation is."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.core.sampling_params import SamplingParams
from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.conversation.conversation import start_conversation
from moeflow.server.api.messages.message_object import MESSAGE_EVENTS, MessageObject, TokenCount
from moeflow.server.api.messages.message_request import CountRequest, MessageRequest
from moeflow.server.api.messages.message_writer import MessageWriter
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.stream_dialect import MESSAGES
from moeflow.server.errors import AnthropicErrorResponse
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import client_of, record_of
from moeflow.server.service import Service, get_service

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorResponse, "description": "The request is refused; the message gives the reason."},
    "5XX": {"model": AnthropicErrorResponse, "description": "The server cannot answer now, or failed."},
}
router = APIRouter(route_class=JsonRoute, tags=["Anthropic"], responses=_ERRORS)


@router.post(
    "/v1/messages",
    response_model=MessageObject,
    responses=stream_of(*MESSAGE_EVENTS, AnthropicErrorResponse, is_typed=True),
)
async def create_message(
    body: MessageRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Answer in a conversation."""
    record_of(request.scope).prompt = body.conversation().messages if service.config.log_prompts else None
    starting = start_message(service, body, client_of(request))
    return await respond(request, starting, MESSAGES, is_streamed=bool(body.stream))


async def start_message(service: Service, body: MessageRequest, client: str) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    Raises: ApiError, RequestError.
    """
    asked = body.conversation()
    served = await service.require_model(body.model)
    message_id = f"msg_{uuid.uuid4().hex}"
    generation, form = await start_conversation(service, served, message_id, asked, client=client)
    head = {"id": message_id, "type": "message", "role": "assistant", "model": served.name}
    return Answer(generation, MessageWriter(generation, form, head, max_tokens=body.max_tokens))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, service: Annotated[Service, Depends(get_service)]) -> TokenCount:
    """Count the tokens of a conversation, tools included."""
    async with service.using(body.model) as model:
        asked = body.asked(SamplingParams())
        prompt = await model.loaded.encode_chat(
            asked.messages, asked.tools.tools, asked.variables, continues_last=asked.begun is not None
        )
    return TokenCount(input_tokens=len(prompt.token_ids))
