"""How fast a request is computed, as llama.cpp reports it: for requests with `timings_per_token`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from moeflow.server.generation import Generation


class TimingsObject(BaseModel):
    """Tokens and times of a request. Counts add up over choices."""

    cache_n: int = Field(description="Tokens of the prompts that were found in the cache.")
    prompt_n: int = Field(description="Tokens of the prompts that were computed.")
    prompt_ms: float = Field(description="From the first pass to the first token.")
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int = Field(description="Tokens that were generated.")
    predicted_ms: float = Field(description="From the first token to the last one.")
    predicted_per_token_ms: float
    predicted_per_second: float


Timings = Annotated[
    TimingsObject | None,
    Field(exclude_if=lambda timings: timings is None, description="Only if the request asks for timings_per_token."),
]


def timings(generation: Generation) -> dict[str, Any]:
    """Return the times so far."""
    cached = generation.num_cached_tokens
    return {
        "cache_n": cached,
        **_speed("prompt", generation.num_prompt_tokens - cached, generation.prompt_s),
        **_speed("predicted", generation.num_completion_tokens, generation.decode_s),
    }


def _speed(name: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / num_tokens, 3) if num_tokens else 0.0,
        f"{name}_per_second": round(num_tokens / seconds, 3) if seconds else 0.0,
    }
