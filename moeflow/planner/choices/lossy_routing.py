"""Whether a network chooses experts in the place of a model's routers."""

from __future__ import annotations

from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.experts.predict.registry import WHOLE_PASS
from moeflow.models.expert_predictor.saved import check_is_saved, folders_of, needed_folders
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import LOSSY_ROUTING, Settings

_FLAG: Final = "--lossy-routing"


def choose_lossy_routing(settings: Settings, checkpoint: Checkpoint, shape: ModelConfig, reasons: Reasons) -> int:
    """Return how many experts of a token the network chooses; 0: routers choose.

    Raises: ConfigError if the model has too few experts, no network is trained for it, or another setting excludes it.
    """
    name = settings.lossy_routing
    if name is None:
        return 0
    if name not in LOSSY_ROUTING:
        raise ConfigError(f"lossy_routing {name!r} is unknown; use one of {', '.join(LOSSY_ROUTING)}")
    top_k = LOSSY_ROUTING[name] * max(shape.routing.top_k, 1)
    if shape.routing.num_experts < top_k:
        raise ConfigError(
            f"{_FLAG} {name} needs {top_k} experts a layer, and this {shape.model_type} model has "
            f"{shape.routing.num_experts}: remove it"
        )
    _check_others(settings)
    folders = folders_of(checkpoint.path, settings.packed_weights_file)
    for folder in needed_folders(folders, shape):
        check_is_saved([folder], f"remove {_FLAG}")
    reasons.append(("lossy_routing", f"{top_k} of each token by the predictor, not the routers: answers may change"))
    return top_k


def _check_others(settings: Settings) -> None:
    """Raises: ConfigError for the first setting whose passes the network does not see token by token."""
    excluded = {
        "--device": settings.device != "cpu",
        "--ranks": (settings.num_ranks or 1) > 1,
        "--stages": settings.stages is not None,
        "--speculator": bool(settings.speculators),
    }
    if flag := next((flag for flag, is_given in excluded.items() if is_given), None):
        raise ConfigError(f"{_FLAG} does not go with {flag}: remove one of the two")


def predictor_of(settings: Settings) -> str:
    """Return what reads experts ahead: the tables that choose them, where the user leaves it open."""
    is_open = settings.lossy_routing is not None and settings.predictor == "auto"
    return WHOLE_PASS if is_open else settings.predictor
