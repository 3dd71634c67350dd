"""A model's embeddings, added positions and output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


class AddedPositions(msgspec.Struct, frozen=True):
    """Positions that are added to token embeddings."""

    kind: Literal["learned", "sinusoidal"]
    count: int  # how many there are, and so the longest context
    first_row: int = 0  # of the first position in the table


class LayerEmbeddings(msgspec.Struct, frozen=True):
    """A table that embeds tokens for each layer (Gemma 4): a layer continues with its part of a row."""

    size: int  # of each layer's part
    vocab_size: int  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """The way from tokens to the first layer, and from the last layer to logits."""

    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0  # of token embeddings as they enter the first layer
    added_positions: AddedPositions | None = None
    layer_embeddings: LayerEmbeddings | None = None  # None: tokens are embedded once
    lm_head_bias: bool = False
    logit_scale: float = 1.0  # of the hidden states that meet the output projection
    logit_soft_cap: float | None = None  # c: logits become c tanh(logit / c)

    @property
    def num_learned_positions(self) -> int:
        """Rows of a table of positions that was learned."""
        added = self.added_positions
        return added.first_row + added.count if added is not None and added.kind == "learned" else 0
