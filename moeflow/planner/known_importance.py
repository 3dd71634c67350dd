"""The learnt importance of a checkpoint's inputs, if known."""

from __future__ import annotations

from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.core.cache_dir import cache_folder
from moeflow.models.importance import importance_file


def importance_place(checkpoint: Checkpoint, cache_dir: Path | None) -> Path:
    """Return where a checkpoint's importance matrix is or would be kept."""
    return importance_file(cache_folder(cache_dir), checkpoint_identity(checkpoint))


def known_importance_file(checkpoint: Checkpoint, cache_dir: Path | None) -> Path | None:
    """Return where it is kept; None if nothing was learnt."""
    file = importance_place(checkpoint, cache_dir)
    return file if file.exists() else None
