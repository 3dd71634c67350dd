"""What `/v1/embeddings` takes and gives, in OpenAI's words."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from moeflow.core.engine_messages import ModelInfo
from moeflow.core.pooling_params import PoolingKind, PoolingParams
from moeflow.server.api.schema.model_limits import NumDimensions
from moeflow.server.api.schema.prompts import Prompt, prompts_of
from moeflow.server.api.schema.strict_model import StrictModel


class EmbeddingRequest(StrictModel):
    """Make a vector of each text."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: float32, little-endian. float unless set."
    )
    dimensions: NumDimensions | None = Field(
        None, description="Keep that many of a vector's first numbers, brought to length 1 again."
    )
    pooling: PoolingKind | None = Field(
        None, description="Tokens whose hidden states make the vector; default: by the model's files."
    )

    def inputs(self) -> list[str | list[int]]:
        """Return the texts, each as text or token ids."""
        return prompts_of(self.input)


def pooling_of(model: ModelInfo, kind: PoolingKind | None, dimensions: int | None = None) -> PoolingParams | None:
    """Return how the engine makes a vector; None: as the model's files say, which is not supported."""
    own = model.pooling
    kind = kind or (None if own is None else own.kind)
    if kind is None:
        return None
    return PoolingParams(kind=kind, normalize=own is None or own.normalize, dimensions=dimensions)


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int  # of the text
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
