"""The predictors by name."""

from __future__ import annotations

from typing import Final

from moeflow.experts.predict.combined import CombinedPredictor
from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import Predictor
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

PREDICTORS: Final[dict[str, type[Predictor]]] = {
    "next-router": NextRouter,
    "frequency": FrequencyPredictor,
    "previous-token": PreviousTokenPredictor,
    "combined": CombinedPredictor,
}
WHOLE_PASS: Final = (
    "sida"  # a network that is trained for a model: predicts all layers before a pass, not layer by layer
)
NO_PREDICTOR: Final = "none"
DEFAULT_PREDICTOR: Final = "next-router"
