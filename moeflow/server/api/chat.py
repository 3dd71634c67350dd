"""`POST /v1/chat/completions`: a conversation in, its next message out."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.engine.generator import Generator
from moeflow.server.api.answer import Answer, Envelope, respond
from moeflow.server.api.chat_form import grammar_of
from moeflow.server.api.chat_writer import ChatForm, ChatWriter
from moeflow.server.api.models import served_model
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.schema.chat import ChatChunk, ChatRequest, ChatResponse
from moeflow.server.generation import Prepared, start_generation
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import record_of
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=stream_of(ChatChunk), tags=["OpenAI"])
async def create_chat_completion(
    body: ChatRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Answer in a conversation."""
    record_of(request.scope).prompt = body.plain_messages() if service.config.log_prompts else None
    return await respond(request, await start_chat(service, body), body)


async def start_chat(service: Service, body: ChatRequest, *, is_batch: bool = False) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    Raises: ApiError, RequestError.
    """
    model = served_model(service, body.model)
    messages, variables, wish = body.plain_messages(), body.template_variables(), body.tool_wish()
    sampling = body.to_sampling_params()
    forms: list[ChatForm] = []

    async def prepare(generator: Generator) -> Prepared:
        prompt = await generator.encode_chat(messages, wish.tools, variables)
        chat_format = generator.tokenizer.chat_format
        make_reader = partial(chat_format.reader, wish.tools, is_reasoning=prompt.is_reasoning)
        forms.append(ChatForm(make_reader, chat_format.syntax.make_id, wish.is_parallel, bool(body.logprobs)))
        grammar = await grammar_of(generator, body, wish, is_reasoning=prompt.is_reasoning)
        shown = generator.tokenizer.special_ids_of(chat_format.markers(wish.tools))
        return Prepared([prompt.token_ids], replace(sampling, grammar=grammar), shown)

    envelope = Envelope(
        f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model.name, "chat.completion", "chat.completion.chunk"
    )
    generation = await start_generation(service, envelope.id, prepare, sampling.n, is_batch=is_batch)
    (form,) = forms
    return Answer(generation, ChatWriter(form), envelope)
