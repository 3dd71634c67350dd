"""What some kinds of models are not run with: one table, and one error for all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.settings.settings import Settings

SHARED_HEADS: Final = "ranks that share attention heads (--attention-layout tensor)"
RANKS: Final = "ranks (--ranks)"
PIPELINES: Final = "pipelines of a device that is smaller than the model (--device)"
DEVICES: Final = "devices that compute like a GPU (--device)"
_STAGES: Final = "stages (--stages)"
_SPECULATORS: Final = "speculators (--speculator)"
_LENDERS: Final = "lenders of memory (--remote-experts)"
_RECORDS: Final = "records of routing (--record-routing)"
_WHOLE_DECODERS: Final = (RANKS, _STAGES, _SPECULATORS, PIPELINES, _LENDERS)

_REFUSED: Final[tuple[tuple[Callable[[ModelConfig], bool], str, tuple[str, ...]], ...]] = (
    # whether a model is of the kind, the property of such models, and the settings it excludes
    (
        lambda shape: shape.encoder is not None,
        "an encoder",
        (SHARED_HEADS, _STAGES, _SPECULATORS, PIPELINES, _LENDERS, DEVICES, _RECORDS),
    ),
    (lambda shape: shape.recurrent is not None, "recurrent layers", _WHOLE_DECODERS),
    (lambda shape: shape.attention.latent is not None, "latent attention", (SHARED_HEADS, PIPELINES)),
    (lambda shape: shape.embeddings.layer_embeddings is not None, "tokens embedded for each layer", (PIPELINES,)),
    (lambda shape: shape.kv_layers != shape.attention_layers, "layers that attend to others' keys", (PIPELINES,)),
)


def why_refused(shape: ModelConfig, what: str) -> str:
    """Return why a model is not run with something of the table; empty: it is."""
    if kind := refusing_kind(shape, what):
        return f"{what} do not go with {kind}, which this model has ({shape.model_type}): remove the option"
    return ""


def refusing_kind(shape: ModelConfig, what: str) -> str:
    """Return the property of a model that excludes something of the table; empty: it has none."""
    return next((name for is_of_kind, name, refused in _REFUSED if what in refused and is_of_kind(shape)), "")


def check_settings(settings: Settings, shape: ModelConfig) -> None:
    """Raise ConfigError for the first setting that a model of its kind is not run with.

    Layouts of ranks, pipelines and devices are asked about where they are chosen.
    """
    asked = {
        RANKS: (settings.num_ranks or 1) > 1,
        _STAGES: settings.stages is not None,
        _SPECULATORS: bool(settings.speculators),
        _RECORDS: settings.record_routing is not None,
        _LENDERS: settings.remote_experts is not None,
    }
    for what, is_asked in asked.items():
        if is_asked and (reason := why_refused(shape, what)):
            raise ConfigError(reason)
