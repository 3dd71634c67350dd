"""What `/classify` takes and gives, in vLLM's words."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from moeflow.server.api.pooling.embedding_objects import EmbeddingUsage
from moeflow.server.api.schema.prompts import Prompt, prompts_of
from moeflow.server.api.schema.strict_model import StrictModel


class ClassificationRequest(StrictModel):
    """Sort each text into one of the model's classes."""

    model: str | None = None
    input: Prompt

    def inputs(self) -> list[str | list[int]]:
        """Return the texts, each as text or token ids."""
        return prompts_of(self.input)


class Classification(BaseModel):
    """The class of one text."""

    index: int  # of the text
    label: str  # of the likeliest class
    probs: list[float]  # of all classes, in the order of the model's labels
    num_classes: int


class ClassificationResponse(BaseModel):
    """The classes of all texts, in their order."""

    id: str
    object: Literal["list"]
    created: int  # unix seconds
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
