"""What becomes of prompts that generate nothing: one request, a vector of each."""

from __future__ import annotations

import uuid
from contextlib import aclosing

from fastapi import Request

from moeflow.core.engine_messages import NO_TOKENS
from moeflow.core.pooling_params import PoolingParams
from moeflow.engine.generator import Generator
from moeflow.server.disconnect import while_connected
from moeflow.server.generation import Generation, Prepared, start_generation
from moeflow.server.request_log import record_of
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service


async def pool(
    service: Service,
    request: Request,
    served: ServedModel,
    inputs: list[str | list[int]],
    pooling: PoolingParams,
    kind: str,
    *,
    is_cut: bool = False,
) -> tuple[list[bytes], int]:
    """Return the float32 numbers made of each input, and how many tokens these have; `kind` begins the request's id.

    `is_cut`: of a text that the context cannot hold, the beginning counts. `served` as for `start_generation`.

    Raises: ApiError, EngineError, RequestError.
    """

    async def prepare(generator: Generator) -> Prepared:
        return Prepared(await generator.encode(inputs, is_cut=is_cut), NO_TOKENS)

    request_id = f"{kind}-{uuid.uuid4().hex}"
    generation = await start_generation(service, served, request_id, prepare, len(inputs), pooling=pooling)
    service.stories.begin(record_of(request.scope), generation)
    vectors = await while_connected(request.receive, _vectors(generation))
    return vectors, generation.num_prompt_tokens


async def _vectors(generation: Generation) -> list[bytes]:
    vectors = [b""] * len(generation.prompts)
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                vectors[index] = delta.embedding or b""
    finally:
        generation.close()
    return vectors
