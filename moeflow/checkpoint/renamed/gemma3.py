"""Gemma 3: norms multiply by one more than their weights; the vision part of multimodal checkpoints is ignored."""

from __future__ import annotations

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.checkpoint.renamed.text_part import text_name


def find_pieces(stored: Checkpoint) -> dict[str, TensorPiece]:
    """Return what each tensor is in the files."""
    return {
        known: TensorPiece(name, info.shape, offset=1.0 if known.endswith("norm.weight") else 0.0)
        for name, info in stored.tensors.items()
        if (known := text_name(name)) is not None
    }
