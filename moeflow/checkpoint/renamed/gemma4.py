"""Gemma 4: experts are stacked, next to their router. Encoders of images and sound are omitted."""

from __future__ import annotations

import re
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import check_num_tensors
from moeflow.checkpoint.renamed.renamed_checkpoint import TensorPiece
from moeflow.checkpoint.renamed.stacks import find_experts
from moeflow.checkpoint.renamed.text_part import text_name

_IN_BLOCK: Final = re.compile(r"(model\.layers\.\d+)\.((?:router|experts)\..+)")


def find_pieces(stored: Checkpoint) -> dict[str, TensorPiece]:
    """Return what each tensor is in the files. Raises: CheckpointError if stacks have other shapes."""
    pieces: dict[str, TensorPiece] = {}
    for name, info in stored.tensors.items():
        text = text_name(name)
        if text is None:
            continue
        known = _IN_BLOCK.sub(r"\1.moe.\2", text)
        pieces |= find_experts(name, info, known) or {known: TensorPiece(name, info.shape)}
        check_num_tensors(len(pieces), stored.path)
    return pieces
