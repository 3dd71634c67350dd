"""Which families' folders are seen by other names than those in the files.

A family's module has `find_pieces(stored)`, and is imported when a folder is of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.renamed.renamed_checkpoint import RenamedCheckpoint
from moeflow.kernels.on_demand import on_demand

_FAMILIES: Final[Mapping[str, Any]] = {
    "dbrx": on_demand("moeflow.checkpoint.renamed.dbrx"),
    "gemma3": on_demand("moeflow.checkpoint.renamed.gemma3"),
    "gemma3_text": on_demand("moeflow.checkpoint.renamed.gemma3"),
    "gemma4": on_demand("moeflow.checkpoint.renamed.gemma4"),
    "gemma4_text": on_demand("moeflow.checkpoint.renamed.gemma4"),
    "gpt_oss": on_demand("moeflow.checkpoint.renamed.gpt_oss"),
    "granitemoe": on_demand("moeflow.checkpoint.renamed.granitemoe"),
    "granitemoehybrid": on_demand("moeflow.checkpoint.renamed.granitemoe"),
    "granitemoeshared": on_demand("moeflow.checkpoint.renamed.granitemoe"),
    "qwen3_next": on_demand("moeflow.checkpoint.renamed.qwen3_next"),
    "qwen3_5": on_demand("moeflow.checkpoint.renamed.qwen3_next"),
    "qwen3_5_moe": on_demand("moeflow.checkpoint.renamed.qwen3_next"),
    "qwen3_5_moe_text": on_demand("moeflow.checkpoint.renamed.qwen3_next"),
    "qwen3_5_text": on_demand("moeflow.checkpoint.renamed.qwen3_next"),
}


def with_known_names(stored: Checkpoint) -> Checkpoint:
    """Return a folder's checkpoint with a name for each matrix. Raises: CheckpointError if tensors do not fit."""
    model_type = stored.config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return stored if family is None else RenamedCheckpoint(stored, family.find_pieces(stored))
