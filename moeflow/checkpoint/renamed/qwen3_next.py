"""Qwen3-Next and Qwen3.5: norms multiply by one more than their weights, but for those that are gated.

Layers that guess further tokens, which come with some files, are left away.
"""

from __future__ import annotations

from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.renamed.renamed_checkpoint import Piece

_GATED: Final = ".linear_attn.norm.weight"
_GUESSING: Final = "mtp."


def find_pieces(stored: Checkpoint) -> dict[str, Piece]:
    """Return what each tensor is in the files."""
    return {
        name: Piece(name, info.shape, offset=1.0 if name.endswith("norm.weight") and not name.endswith(_GATED) else 0.0)
        for name, info in stored.tensors.items()
        if not name.startswith(_GUESSING)
    }
