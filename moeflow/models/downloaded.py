"""Describes a downloaded model for lists: its format, its size, its family, and whether it can be run."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.checkpoint.hub.cached_models import CachedModel
from moeflow.core.errors import MoeflowError
from moeflow.models.file_facts import read_file_facts


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """A model in the hub's cache."""

    name: str
    format: str  # GGUF or safetensors
    size_bytes: int
    family: str | None  # None: it cannot be run
    is_supported: bool
    problem: str | None  # why not
    last_used_s: float  # since the epoch
    path: str


def describe(model: CachedModel) -> DownloadedModel:
    """Return the description of a model; reads its headers."""
    family, problem = None, None
    try:
        family = read_file_facts(model.path).model_type
    except (MoeflowError, OSError) as error:
        problem = str(error)
    return DownloadedModel(
        name=str(model.name),
        format="GGUF" if model.name.file else "safetensors",
        size_bytes=model.num_bytes,
        family=family,
        is_supported=problem is None,
        problem=problem,
        last_used_s=model.last_used_s,
        path=str(model.path),
    )
