"""The predictors by name. A new one is a file and a row, or an entry point of another package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from moeflow.core.extensions import ExtensibleTable
from moeflow.experts.predict.combined import CombinedPredictor
from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import MAX_LOOK_AHEAD, Predictor, RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

_OWN: Final[dict[str, Callable[[RoutedModel], Predictor]]] = {
    "next-router": NextRouter,
    **{f"next-router:{layers}": partial(NextRouter, layers_ahead=layers) for layers in range(2, MAX_LOOK_AHEAD + 1)},
    "frequency": FrequencyPredictor,
    "previous-token": PreviousTokenPredictor,
    "combined": CombinedPredictor,
}
PREDICTORS: Final = ExtensibleTable("moeflow.predictors", _OWN)
BY_ROUTERS: Final = tuple(name for name in _OWN if name.startswith("next-router"))
COMBINED: Final = "combined"
WHOLE_PASS: Final = "sida"  # a network, trained for the model, that predicts all layers before a pass
NO_PREDICTOR: Final = "none"
DEFAULT_PREDICTOR: Final = "next-router"
