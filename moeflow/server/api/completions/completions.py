"""`POST /v1/completions`: text or token ids in, their continuation out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from moeflow.server.api.answer import Answer, respond
from moeflow.server.api.choices import Choice, Envelope, ListWriter, token_trees
from moeflow.server.api.completions.completion_objects import CompletionChunk, CompletionRequest, CompletionResponse
from moeflow.server.api.logprobs import CompletionLogprobsWriter
from moeflow.server.api.openapi import stream_of
from moeflow.server.api.stream_dialect import LISTS
from moeflow.server.api.text_generation import start_text_generation
from moeflow.server.generation import Generation
from moeflow.server.guard.body import JsonRoute
from moeflow.server.request_log import client_of, record_of
from moeflow.server.service import Service, get_service
from moeflow.text.output_text import TextDelta, TokenText

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions", response_model=CompletionResponse, responses=stream_of(CompletionChunk), tags=["OpenAI"]
)
async def create_completion(
    body: CompletionRequest, request: Request, service: Annotated[Service, Depends(get_service)]
) -> Response | dict[str, Any]:
    """Continue one or several prompts."""
    record_of(request.scope).prompt = body.prompt if service.config.log_prompts else None
    starting = start_completion(service, body, client=client_of(request))
    return await respond(request, starting, LISTS, is_streamed=bool(body.stream))


async def start_completion(
    service: Service, body: CompletionRequest, *, is_batch: bool = False, client: str | None = None
) -> Answer:
    """Check and admit a request; the work begins when its answer is awaited or streamed.

    Raises: ApiError, RequestError.
    """
    prompts, sampling, form = body.prompts(), body.to_sampling_params(), body.answer_form()
    served = await service.require_model(body.model, is_batch=is_batch)

    envelope = Envelope(f"cmpl-{uuid.uuid4().hex}", int(time.time()), served.name, "text_completion", "text_completion")
    generation = await start_text_generation(
        service, served, envelope.id, prompts, sampling, form, is_batch=is_batch, client=client
    )
    choices = _Writer(body, prompts, generation)
    writer = ListWriter(
        generation, choices, envelope, with_usage=body.wants_usage, with_timings=bool(body.timings_per_token)
    )
    return Answer(generation, writer)


class _Writer:
    """Writes choice objects, the prompt first where an echo is wanted."""

    def __init__(self, body: CompletionRequest, prompts: list[str | list[int]], generation: Generation) -> None:
        self._body = body
        self._prompts = prompts
        self._generation = generation
        self._tokenizer = generation.generator.tokenizer
        num_choices = len(prompts) * generation.n
        self._logprobs = [CompletionLogprobsWriter() for _ in range(num_choices)]
        self._is_to_echo = [bool(body.echo)] * num_choices

    def chunk_choices(self, choice: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return one choice object; none if it would be empty, but for one with the progress of a prompt."""
        if delta.prompt_progress is not None:
            return [self._object(choice, "", [], None)]
        text, tokens = delta.text, list[TokenText | bytes](delta.logprobs or ())
        if self._is_to_echo[choice]:
            self._is_to_echo[choice] = False
            text = self._prompt_text(choice) + text
            tokens = self._prompt_tokens(choice, delta.prompt_logprobs or ()) + tokens
        passes = () if delta.drafted_pass is None else (delta.drafted_pass,)
        if not (text or tokens or passes or delta.finish_reason):
            return []
        return [self._object(choice, text, tokens, delta.finish_reason) | token_trees(passes)]

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the whole choice."""
        text, tokens = choice.text, list[TokenText | bytes](choice.tokens)
        if self._body.echo:
            text = self._prompt_text(choice.index) + text
            tokens = self._prompt_tokens(choice.index, choice.prompt_tokens) + tokens
        return self._object(choice.index, text, tokens, choice.finish_reason) | token_trees(choice.drafted_passes)

    def _object(
        self, choice: int, text: str, tokens: list[TokenText | bytes], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else self._logprobs[choice].write(tokens)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _prompt_text(self, choice: int) -> str:
        prompt = self._prompts[choice // self._generation.n]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens is not False)

    def _prompt_tokens(self, choice: int, tokens: Sequence[TokenText | None]) -> list[TokenText | bytes]:
        """Return the prompt's tokens, if log-probabilities are wanted; the first has none, just its bytes."""
        if self._body.logprobs is None:
            return []
        first = self._generation.prompts[choice // self._generation.n][0]
        return [self._tokenizer.token_bytes(first), *(token for token in tokens if token is not None)]
