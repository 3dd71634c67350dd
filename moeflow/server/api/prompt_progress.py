"""How far a prompt is computed, as llama.cpp reports it in chunks of a stream: for requests with `return_progress`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from moeflow.core.engine_messages import PromptProgress


class ProgressObject(BaseModel):
    """How far a choice's prompt is computed."""

    total: int = Field(description="Tokens of the prompt.")
    cache: int = Field(description="Tokens that were found in the cache.")
    processed: int = Field(description="Tokens that are computed, cached ones included.")
    time_ms: int = Field(description="Since the computation began.")


Progress = Annotated[
    ProgressObject | None,
    Field(exclude_if=lambda progress: progress is None, description="Only if the request asks for return_progress."),
]


def progress_object(progress: PromptProgress) -> dict[str, Any]:
    """Return the object of a chunk."""
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached_tokens,
        "processed": progress.num_computed_tokens,
        "time_ms": round(progress.elapsed_s * 1000),
    }
