"""The files that moeflow makes from a model and keeps in its cache folder: packed weights, and learnt data for them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.core.errors import MoeflowError
from moeflow.models.expert_predictor.saved import carried_folder
from moeflow.planner.known_importance import importance_place
from moeflow.planner.known_routing import popularity_file, routing_file


def made_files(model: Path, cache_dir: Path) -> list[Path]:
    """Return files and folders that can be made again of a model, and are no other's; none if it cannot be read."""
    try:
        with closing(open_checkpoint(model)) as checkpoint:
            identity = checkpoint_identity(checkpoint)
            routing = [routing_file(checkpoint, cache_dir), popularity_file(checkpoint, cache_dir)]
            learnt = [importance_place(checkpoint, cache_dir), *routing]
    except MoeflowError:
        return []
    packed = [file for file in sorted((cache_dir / "experts").glob("*.slabs")) if _identity(file) == identity]
    return [it for it in (*packed, *map(carried_folder, packed), *learnt) if it.exists()]


def _identity(packed_file: Path) -> str | None:
    try:
        return read_slab_index(packed_file).spec.identity
    except MoeflowError:
        return None
