"""Qwen3-Next and Qwen3.5: norms multiply by their weights plus one, except gated norms.

Experts may be stacked. Layers for multi-token prediction and encoders of images are omitted.
"""

from __future__ import annotations

from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.checkpoint.renamed.stacks import find_experts
from moeflow.checkpoint.renamed.text_part import text_name

_GATED: Final = ".linear_attn.norm.weight"
_GUESSING: Final = "mtp."


def find_pieces(stored: Checkpoint) -> dict[str, TensorPiece]:
    """Return what each tensor is in the files. Raises: CheckpointError if stacks have other shapes."""
    pieces: dict[str, TensorPiece] = {}
    for name, info in stored.tensors.items():
        known = text_name(name)
        if known is None or name.startswith(_GUESSING):
            continue
        is_shifted = known.endswith("norm.weight") and not known.endswith(_GATED)
        experts = find_experts(name, info, known)
        pieces |= experts or {known: TensorPiece(name, info.shape, offset=1.0 if is_shifted else 0.0)}
        check_num_tensors(len(pieces), stored.path)
    return pieces
