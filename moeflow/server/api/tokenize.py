"""`POST /tokenize` and `/detokenize`: what the model's tokenizer makes of a text, and back."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from moeflow.core.errors import RequestError
from moeflow.server.api.chat_schema import ChatMessage
from moeflow.server.api.models import served_model
from moeflow.server.api.sampling_fields import TokenIds
from moeflow.server.api.strict_model import StrictModel
from moeflow.server.guard.body import JsonRoute
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(StrictModel):
    """A text, or a conversation as the chat endpoint would put it to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="For a text; true unless set.")


class TokenizeResponse(BaseModel):
    """Token ids."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(StrictModel):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """The text they stand for."""

    prompt: str


@router.post("/tokenize", tags=["tokens"])
async def tokenize(body: TokenizeRequest, service: Annotated[Service, Depends(get_service)]) -> TokenizeResponse:
    """Turn a text or a conversation into token ids."""
    model = served_model(service, body.model)
    tokenizer = service.require_generator().tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = [message.plain() for message in body.messages]
        tokens = await asyncio.to_thread(tokenizer.apply_chat_template, messages)
    else:
        special = body.add_special_tokens is not False
        tokens = await asyncio.to_thread(tokenizer.encode, body.prompt or "", add_special_tokens=special)
    return TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=model.max_model_len)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeRequest, service: Annotated[Service, Depends(get_service)]) -> DetokenizeResponse:
    """Turn token ids into text, special tokens included."""
    model = served_model(service, body.model)
    tokenizer = service.require_generator().tokenizer
    if any(token_id >= model.vocab_size for token_id in body.tokens):
        raise RequestError(f"token ids must be below {model.vocab_size}, the size of the vocabulary", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)
