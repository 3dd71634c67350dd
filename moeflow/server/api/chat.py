"""`POST /v1/chat/completions`: a conversation in, its next message out."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.engine.generator import Generator
from moeflow.engine.text.output_text import TextDelta
from moeflow.server.api.answer import Answer, Choice, Envelope, respond, token_trees
from moeflow.server.api.logprobs import chat_logprobs
from moeflow.server.api.models import served_model
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.schema.chat import ChatChunk, ChatRequest, ChatResponse
from moeflow.server.generation import start_generation
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
    messages = body.plain_messages()

    async def encode(generator: Generator) -> list[list[int]]:
        return [await generator.encode_chat(messages)]

    envelope = Envelope(
        f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model.name, "chat.completion", "chat.completion.chunk"
    )
    generation = await start_generation(service, envelope.id, encode, 1, body.to_sampling_params(), is_batch=is_batch)
    return Answer(generation, _Writer(with_logprobs=bool(body.logprobs)), envelope)


class _Writer:
    """Writes choice objects as OpenAI does: a stream names the role first and the reason to end alone."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._begun: set[int] = set()

    def chunk_choices(self, choice: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return up to three choice objects: role, text, end."""
        chunks = []
        if choice not in self._begun:
            self._begun.add(choice)
            chunks.append(_chunk(choice, {"role": "assistant", "content": "", "refusal": None}))
        if delta.text or delta.logprobs or delta.guessed_pass:
            logprobs = chat_logprobs(delta.logprobs or ()) if self._with_logprobs else None
            trees = () if delta.guessed_pass is None else (delta.guessed_pass,)
            chunks.append(_chunk(choice, {"content": delta.text}, logprobs) | token_trees(trees))
        if delta.finish_reason is not None:
            chunks.append(_chunk(choice, {}, finish_reason=delta.finish_reason))
        return chunks

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the whole answer."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.tokens) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
            **token_trees(choice.guessed_passes),
        }


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
