"""Which families' folders are seen by other names than those in the files.

A family's module has `find_pieces(stored)`, and is imported when a folder is of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.renamed.renamed_checkpoint import RenamedCheckpoint
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from moeflow.checkpoint.renamed import dbrx, gemma3, gemma4, gpt_oss, granitemoe, qwen3_next

_FAMILIES: Final[Mapping[str, Any]] = {
    "dbrx": dbrx,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "granitemoehybrid": granitemoe,
    "granitemoeshared": granitemoe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_next,
    "qwen3_5_moe": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "qwen3_5_text": qwen3_next,
}


def with_known_names(stored: Checkpoint) -> Checkpoint:
    """Return a folder's checkpoint with a name for each matrix. Raises: CheckpointError if tensors do not fit."""
    model_type = stored.config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return stored if family is None else RenamedCheckpoint(stored, family.find_pieces(stored))
