"""What `/rerank` and `/score` take and give, in the words of Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from moeflow.core.errors import RequestError
from moeflow.core.pooling_params import PoolingKind
from moeflow.server.api.pooling.embedding_objects import EmbeddingUsage
from moeflow.server.api.schema.prompts import Text
from moeflow.server.api.schema.strict_model import StrictModel, one_of

MAX_TEXTS: Final = 1000  # of a list, as Cohere has it; the queue may take fewer


def _is_none(value: Any) -> bool:
    return value is None


class ScoringFields(StrictModel):
    """Which model compares texts, and how it makes vectors of them."""

    model: str | None = None
    pooling: PoolingKind | None = Field(None, description="As for /v1/embeddings.")


class TextDocument(StrictModel):
    """A document as an object."""

    text: Text


Document = Annotated[Text | TextDocument, one_of("a text or an object with a text, not empty")]
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS)]
Texts = Annotated[
    Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)],
    one_of("a string or a list of strings, none of them empty"),
]


class RerankRequest(ScoringFields):
    """Order documents by how much they have to do with a query."""

    query: Text
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        None, description="So many of the best documents are returned; 0 or null: all."
    )
    return_documents: bool | None = Field(None, description="The answer repeats the texts; true unless set.")

    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(ScoringFields):
    """Compare pairs of texts: the first with each of the others, or each with the one at its place."""

    text_1: Texts
    text_2: Texts = Field(description="As many as in text_1, unless that is one text.")

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare. Raises: RequestError if the numbers of texts do not match."""
        first, second = ([given] if isinstance(given, str) else given for given in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give as many, or one text_1", param="text_2"
            )
        return list(zip(first, second, strict=True))


class RankedText(BaseModel):
    """A document's text."""

    text: str


class RankedDocument(BaseModel):
    """A document and its score."""

    index: int  # of the document in the request
    document: Annotated[RankedText | None, Field(exclude_if=_is_none)] = None
    relevance_score: float


class RerankResponse(BaseModel):
    """Documents, the best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class Score(BaseModel):
    """How alike the texts of one pair are."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int  # unix seconds
    model: str
    data: list[Score]
    usage: EmbeddingUsage
