"""`POST /tokenize` and `/detokenize`: what the model's tokenizer makes of a text, and back."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import msgspec
from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from moeflow.core.errors import RequestError
from moeflow.engine.generator import num_chars
from moeflow.server.api.chat.chat_objects import ChatMessage
from moeflow.server.api.conversation.continuation import ContinuationFields
from moeflow.server.api.schema.field_rules import Rule, exactly_one, not_all
from moeflow.server.api.schema.sampling_fields import TokenIds
from moeflow.server.api.schema.strict_model import StrictModel
from moeflow.server.guard.body import JsonRoute
from moeflow.server.service import Service, get_service

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(ContinuationFields):
    """A text, or a conversation as the chat endpoint would put it to the model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one("prompt", "messages"),
        not_all(
            "continue_final_message",
            "continue_final_message needs messages, not prompt",
            {"continue_final_message": (None, False), "prompt": (None,)},
        ),
    )

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


@router.post("/tokenize", response_model=TokenizeResponse, tags=["tokens"])
async def tokenize(body: TokenizeRequest, service: Annotated[Service, Depends(get_service)]) -> Response:
    """Turn a text or a conversation into token ids."""
    async with service.using(body.model) as model:
        generator, max_model_len = model.loaded, model.info.max_model_len
        if body.messages is not None:
            messages = [message.plain() for message in body.messages]
            is_continued = body.begun(messages) is not None
            size = num_chars(messages)
            encode = partial(generator.tokenizer.apply_chat_template, messages, continues_last=is_continued)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            size, encode = len(text), partial(generator.tokenizer.encode, text, add_special_tokens=special)

        def work() -> bytes:  # all of it, as a million numbers take long to write, too
            tokens = encode()
            return msgspec.json.encode({"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len})

        return Response(await generator.lanes.run(size, work), media_type="application/json")


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeRequest, service: Annotated[Service, Depends(get_service)]) -> DetokenizeResponse:
    """Turn token ids into text, special tokens included."""
    async with service.using(body.model) as model:
        vocab_size = model.info.vocab_size
        if any(token_id >= vocab_size for token_id in body.tokens):
            raise RequestError(f"token ids must be below {vocab_size}, the size of the vocabulary", param="tokens")
        decode = partial(model.loaded.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=await model.loaded.lanes.run(len(body.tokens), decode))
