"""What goes into predictors: rows of a model's embeddings, as they stand in its checkpoint."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.models.registry import read_model_config

_EMBEDDINGS: Final = "model.embed_tokens.weight"
_SHARED_EMBEDDINGS: Final = "shared.weight"  # of an encoder-decoder


def read_embeddings(checkpoint: Checkpoint) -> Tensor:
    """Return the embeddings of all tokens: [V, H] float32."""
    has_encoder = read_model_config(checkpoint).encoder is not None
    return checkpoint.read(_SHARED_EMBEDDINGS if has_encoder else _EMBEDDINGS).float()
