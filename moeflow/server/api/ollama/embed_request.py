"""What `/api/embed` and the older `/api/embeddings` take and give."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, Field

from moeflow.core.pooling_params import PoolingParams
from moeflow.server.api.ollama.generating_request import MODEL, KeepAlive
from moeflow.server.api.ollama.options import OllamaOptions
from moeflow.server.api.schema.model_limits import PROMPTS, NumDimensions
from moeflow.server.api.schema.prompts import Text
from moeflow.server.api.schema.sampling_fields import IGNORED
from moeflow.server.api.schema.strict_model import StrictModel, one_of


class _EmbeddingFields(StrictModel):
    """What both have in common."""

    model: str | None = Field(None, description=MODEL)
    options: OllamaOptions | None = Field(None, description=IGNORED)
    keep_alive: KeepAlive | None = Field(None, description=IGNORED)


class OllamaEmbedRequest(_EmbeddingFields):
    """Make a vector of each text."""

    input: Annotated[
        str | Annotated[list[Text], Field(fail_fast=True, json_schema_extra=PROMPTS)],
        one_of("a string, or a list of strings that are not empty"),
    ]
    truncate: bool | None = Field(
        None, description="Whether a text that the context cannot hold is cut, not refused; true unless set."
    )
    dimensions: NumDimensions | None = Field(None, description="Keep that many of a vector's first numbers.")

    def inputs(self) -> list[str]:
        """Return the texts; none for an empty string."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input

    def pooling(self, own: PoolingParams | None) -> PoolingParams | None:
        """Return how a vector is made, where the model's files say `own`."""
        return own if own is None else replace(own, dimensions=self.dimensions)


class OllamaEmbeddingsRequest(_EmbeddingFields):
    """Make a vector of a text."""

    prompt: str | None = None


class OllamaEmbedResponse(BaseModel):
    """The vectors of all texts, in their order. Times are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(BaseModel):
    """The vector of the text; empty if the text is."""

    embedding: list[float]
