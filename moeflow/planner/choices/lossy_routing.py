"""Whether a network chooses an encoder's experts in the place of its routers."""

from __future__ import annotations

from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.experts.predict.registry import WHOLE_PASS
from moeflow.models.expert_predictor.saved import check_is_saved, folders_of
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import LOSSY_ROUTING, Settings

_FLAG: Final = "--lossy-routing"


def choose_lossy_routing(settings: Settings, checkpoint: Checkpoint, shape: ModelConfig, reasons: Reasons) -> int:
    """Return how many experts of a token the network chooses; 0: routers choose.

    Raises: ConfigError if the model has no encoder with experts, or no network is trained for it.
    """
    name = settings.lossy_routing
    if name is None:
        return 0
    if name not in LOSSY_ROUTING:
        raise ConfigError(f"lossy_routing {name!r} is unknown; use one of {', '.join(LOSSY_ROUTING)}")
    top_k = LOSSY_ROUTING[name]
    if shape.encoder is None or shape.routing.num_experts < top_k:
        raise ConfigError(
            f"{_FLAG} {name} is for encoders with {top_k} experts or more, which a {shape.model_type} model of "
            f"{shape.routing.num_experts} has not: remove it"
        )
    check_is_saved(folders_of(checkpoint.path, settings.packed_weights_file)[:1], f"remove {_FLAG}")
    reasons.append(("lossy_routing", f"{top_k} of each token by the predictor, not the routers: answers may change"))
    return top_k


def predictor_of(settings: Settings) -> str:
    """Return what reads experts ahead: the tables that choose them, where the user leaves it open."""
    is_open = settings.lossy_routing is not None and settings.predictor == "auto"
    return WHOLE_PASS if is_open else settings.predictor
