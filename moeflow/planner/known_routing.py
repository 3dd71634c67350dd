"""The learnt routing of a checkpoint, if known."""

from __future__ import annotations

from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.core.cache_dir import cache_folder
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile, load_profile, profile_file


def routing_file(checkpoint: Checkpoint, cache_dir: Path | None) -> Path:
    """Return where a checkpoint's profile is kept."""
    return profile_file(cache_folder(cache_dir), checkpoint_identity(checkpoint))


def popularity_file(checkpoint: Checkpoint, cache_dir: Path | None) -> Path:
    """Return where the choices are kept that a profile was learnt from."""
    return routing_file(checkpoint, cache_dir).with_suffix(".moe")


def known_popularity(checkpoint: Checkpoint | None, cache_dir: Path | None) -> str:
    """Return the file of these choices; empty: there is none. `checkpoint` None: the model has no weights."""
    file = None if checkpoint is None else popularity_file(checkpoint, cache_dir)
    return str(file) if file is not None and file.exists() else ""


def known_routing(checkpoint: Checkpoint | None, cache_dir: Path | None) -> RoutingProfile:
    """Return the learnt routing; even routing if none is known. `checkpoint` None: the model has no weights."""
    if checkpoint is None:
        return EVEN_ROUTING
    return load_profile(routing_file(checkpoint, cache_dir)) or EVEN_ROUTING
