"""`POST /api/chat`: a conversation in, its next message out, in Ollama's API."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.conversation.conversation import start_conversation
from moeflow.server.api.ollama.answer_objects import OllamaChatResponse
from moeflow.server.api.ollama.chat_request import OllamaChatRequest
from moeflow.server.api.ollama.heads import chat_shape, dialect
from moeflow.server.api.ollama.line_writer import LineWriter
from moeflow.server.api.ollama.load import load_or_unload, loaded
from moeflow.server.api.ollama.route import OllamaRoute
from moeflow.server.api.openapi import OLLAMA_ERRORS, lines_of
from moeflow.server.request_log import client_of, record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=OllamaRoute, tags=["Ollama"], responses=OLLAMA_ERRORS)


@router.post(
    "/api/chat",
    response_model=OllamaChatResponse,
    response_model_exclude_unset=True,
    responses=lines_of(OllamaChatResponse),
)
async def chat(
    body: OllamaChatRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Answer in a conversation. Without messages the model is loaded."""
    if not body.messages:
        return await load_or_unload(service, body, chat_shape)
    record_of(request.scope).prompt = body.conversation().messages if service.config.log_prompts else None
    starting = start_chat(service, body, client_of(request))
    return await respond(request, starting, dialect(body.model, chat_shape), is_streamed=body.is_streamed)


async def start_chat(service: Service, body: OllamaChatRequest, client: str) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    Raises: ApiError, RequestError.
    """
    request_id, asked = f"ollama-{uuid.uuid4().hex}", body.conversation()
    served, clock = await loaded(service, body)
    generation, form = await start_conversation(service, served, request_id, asked, client=client)
    return Answer(generation, LineWriter(served.name, generation, form, chat_shape, clock))
