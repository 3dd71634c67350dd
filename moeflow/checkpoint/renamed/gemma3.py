"""Gemma 3: norms multiply by one more than their weights; where it sees images, too, that is left away."""

from __future__ import annotations

import re
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.renamed.renamed_checkpoint import Piece

# Of files that transformers wrote before its version 5, and since.
_TEXT: Final = re.compile(r"(language_model\.model|model\.language_model)\.")
_OF_IMAGES: Final = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")
_HEAD: Final = "language_model.lm_head.weight"


def find_pieces(stored: Checkpoint) -> dict[str, Piece]:
    """Return what each tensor is in the files."""
    pieces: dict[str, Piece] = {}
    for name, info in stored.tensors.items():
        if _OF_IMAGES.fullmatch(name):
            continue
        known = "lm_head.weight" if name == _HEAD else _TEXT.sub("model.", name, count=1)
        pieces[known] = Piece(name, info.shape, offset=1.0 if known.endswith("norm.weight") else 0.0)
    return pieces
