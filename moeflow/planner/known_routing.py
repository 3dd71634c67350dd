"""The learnt routing of a checkpoint, if known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.core.cache_dir import cache_folder
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile, load_profile, profile_file

with on_demand(__name__):
    from moeflow.workload import routing_trace


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


def known_loads(
    checkpoint: Checkpoint | None, cache_dir: Path | None, shape: ModelConfig
) -> tuple[tuple[int, ...], ...]:
    """Return how often each expert of each MoE layer was chosen; empty: unknown. `checkpoint` None: as above.

    Loads of another number of layers or experts than `shape` has are unknown.

    Raises: ConfigError if the file cannot be read.
    """
    file = known_popularity(checkpoint, cache_dir)
    loads = load_counts(Path(file)) if file else ()
    sizes = (shape.routing.num_experts,) * shape.num_moe_layers
    return loads if tuple(map(len, loads)) == sizes else ()


def load_counts(file: Path) -> tuple[tuple[int, ...], ...]:
    """Return the choices of each expert of each layer in recorded routing. Raises: ConfigError."""
    trace = routing_trace.read_routing_trace(file)
    counts = np.zeros((trace.header.num_layers, trace.header.num_experts), int)
    for routed in trace.passes:
        counts += [np.bincount(ids.reshape(-1), minlength=counts.shape[1]) for ids in routed.ids]
    return tuple(map(tuple, counts.tolist()))


def known_routing(checkpoint: Checkpoint | None, cache_dir: Path | None) -> RoutingProfile:
    """Return the learnt routing; even routing if none is known. `checkpoint` None: the model has no weights."""
    if checkpoint is None:
        return EVEN_ROUTING
    return load_profile(routing_file(checkpoint, cache_dir)) or EVEN_ROUTING
