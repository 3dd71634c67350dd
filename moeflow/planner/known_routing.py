"""What was learnt of a checkpoint's routers, if anything was."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.cache_dir import cache_folder
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile, load_profile, profile_file


def routing_file(model: str | Path, cache_dir: Path | None) -> Path:
    """Return where a checkpoint's profile is kept. Raises: CheckpointError if there is no checkpoint."""
    with closing(open_checkpoint(model)) as checkpoint:
        return profile_file(cache_folder(cache_dir), checkpoint_identity(checkpoint))


def known_routing(model: str | Path, cache_dir: Path | None) -> RoutingProfile:
    """Return what was learnt; even routing if nothing was. Raises: CheckpointError if there is no checkpoint."""
    return load_profile(routing_file(model, cache_dir)) or EVEN_ROUTING
