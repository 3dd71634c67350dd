"""`POST /v1/chat/completions`: a conversation in, its next message out."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.chat.chat_objects import ChatChunk, ChatRequest, ChatResponse
from moeflow.server.api.chat.chat_writer import ChatWriter
from moeflow.server.api.choices import Envelope, ListWriter
from moeflow.server.api.conversation.conversation import start_conversation
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.stream_dialect import LISTS
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import client_of, record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=stream_of(ChatChunk), tags=["OpenAI"])
async def create_chat_completion(
    body: ChatRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Answer in a conversation."""
    record_of(request.scope).prompt = body.conversation().messages if service.config.log_prompts else None
    starting = start_chat(service, body, client=client_of(request))
    return await respond(request, starting, LISTS, is_streamed=bool(body.stream))


async def start_chat(
    service: Service, body: ChatRequest, *, is_batch: bool = False, client: str | None = None
) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    Raises: ApiError, RequestError.
    """
    asked = body.conversation()
    served = await service.require_model(body.model, is_batch=is_batch)
    envelope = Envelope(
        f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), served.name, "chat.completion", "chat.completion.chunk"
    )
    generation, form = await start_conversation(service, served, envelope.id, asked, is_batch=is_batch, client=client)
    choices = ChatWriter(form, with_logprobs=bool(body.logprobs))
    writer = ListWriter(
        generation, choices, envelope, with_usage=body.wants_usage, with_timings=bool(body.timings_per_token)
    )
    return Answer(generation, writer)
