"""Which families' folders are seen by other names than those in the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.renamed import dbrx, gemma3, gpt_oss, granitemoe
from moeflow.checkpoint.renamed.renamed_checkpoint import Piece, RenamedCheckpoint

_FAMILIES: Final[Mapping[str, Callable[[Checkpoint], Mapping[str, Piece]]]] = {
    "dbrx": dbrx.find_pieces,
    "gemma3": gemma3.find_pieces,
    "gemma3_text": gemma3.find_pieces,
    "gpt_oss": gpt_oss.find_pieces,
    "granitemoe": granitemoe.find_pieces,
    "granitemoeshared": granitemoe.find_pieces,
}


def with_known_names(stored: Checkpoint) -> Checkpoint:
    """Return a folder's checkpoint with a name for each matrix. Raises: CheckpointError if tensors do not fit."""
    model_type = stored.config.get("model_type")
    find_pieces = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return stored if find_pieces is None else RenamedCheckpoint(stored, find_pieces(stored))
