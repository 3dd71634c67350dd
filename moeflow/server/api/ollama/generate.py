"""`POST /api/generate`: a prompt in, its answer or its continuation out, in Ollama's API."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.conversation.conversation import AnswerForm, start_conversation
from moeflow.server.api.ollama.answer_objects import OllamaGenerateResponse
from moeflow.server.api.ollama.generate_request import OllamaGenerateRequest
from moeflow.server.api.ollama.heads import dialect, generate_shape
from moeflow.server.api.ollama.line_writer import LineWriter
from moeflow.server.api.ollama.load import load_or_unload, loaded
from moeflow.server.api.ollama.route import OllamaRoute
from moeflow.server.api.openapi import OLLAMA_ERRORS, lines_of
from moeflow.server.api.text_generation import start_text_generation
from moeflow.server.request_log import client_of, record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=OllamaRoute, tags=["Ollama"], responses=OLLAMA_ERRORS)


@router.post(
    "/api/generate",
    response_model=OllamaGenerateResponse,
    response_model_exclude_unset=True,
    responses=lines_of(OllamaGenerateResponse),
)
async def generate(
    body: OllamaGenerateRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Answer a prompt, or continue it. Without a prompt the model is loaded."""
    if not body.prompt:
        return await load_or_unload(service, body, generate_shape)
    record_of(request.scope).prompt = body.prompt if service.config.log_prompts else None
    starting = start_generate(service, body, body.prompt, client_of(request))
    return await respond(request, starting, dialect(body.model, generate_shape), is_streamed=body.is_streamed)


async def start_generate(service: Service, body: OllamaGenerateRequest, prompt: str, client: str) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    A model without a chat template continues the prompt.

    Raises: ApiError, RequestError.
    """
    request_id, asked = f"ollama-{uuid.uuid4().hex}", body.conversation()
    served, clock = await loaded(service, body)
    if not body.raw and (served.loaded.tokenizer.has_chat_template or body.system or body.context):
        generation, form = await start_conversation(service, served, request_id, asked, client=client)
    else:
        generation = await start_text_generation(
            service, served, request_id, [prompt], asked.sampling, asked.form, client=client
        )
        form = AnswerForm(lambda: None, lambda: "")
    writer = LineWriter(served.name, generation, form, generate_shape, clock, with_context=not body.raw)
    return Answer(generation, writer)
