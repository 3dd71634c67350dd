"""Combines several predictors, each weighted by its recent accuracy: learnt online, from the traffic.

For each place in a predictor's list, counts give the log-odds that the expert there is needed. An expert's log-odds are
the weighted sum over predictors. The weights are learnt by logistic regression, one step a layer and pass. So
predictors that agree do not count twice, and useless ones count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.network_names import NamedLayers
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import Predictor, RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

MIN_CHANCE: Final = 0.25  # of being needed; most reads of less likely experts would be useless
_NUM_PLACES: Final = 16  # of a list with counts of their own; two more count the rest, and unlisted experts
_DECAY: Final = 0.5 ** (1 / 256)  # of counts, a pass: the text changes
_LEAST: Final = 1e-3  # chance of an event, and of its opposite
_RATE: Final = 0.02  # of learning weights


class _Predicted(msgspec.Struct, frozen=True):
    """The predictions for a layer.

    Shapes: places [members, E] int64, of each expert in each list; chances [E], of being needed; adds [members, E],
    the terms of the log-odds.
    """

    places: NDArray[np.int64]
    chances: NDArray[np.float64]
    adds: NDArray[np.float64]


class CombinedPredictor(Predictor):
    """Combines the next layer's router, the previous pass, frequencies of use, and a network."""

    def __init__(self, model: RoutedModel) -> None:
        super().__init__(model)
        kinds: list[type[Predictor]] = [PreviousTokenPredictor, FrequencyPredictor]
        kinds += [NextRouter] if model.routers else []
        kinds += [NamedLayers] if model.has_network else []
        self._members = [kind(model) for kind in kinds]
        self._num_experts = model.num_experts
        size = (len(self._members), _NUM_PLACES + 2)
        self._needed = np.full(size, 0.5)  # decayed number of times that the expert in a place was needed
        self._listed = np.ones(size)  # ... and that a place had an expert
        self._weights = np.full(len(self._members), 1 / len(self._members))
        self._predicted: list[_Predicted | None] = [
            None
        ] * model.num_layers  # the last prediction for each layer to come

    def expect(self, named: Sequence[Sequence[int]]) -> None:
        """Forward a network's prediction to all predictors."""
        for member in self._members:
            member.expect(named)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Learn from the layer's prediction, then forward its choice to all predictors."""
        is_needed = np.zeros(self._num_experts)
        is_needed[np.asarray(expert_ids, dtype=np.int64)] = 1
        self._learn(self._predicted[layer] or self._combined(layer), is_needed)
        self._predicted[layer] = None
        for member in self._members:
            member.observe(layer, expert_ids)

    def observe_input(self, layer: int, hidden: Any) -> None:
        """Forward a layer's input [T, H] to all predictors."""
        for member in self._members:
            member.observe_input(layer, hidden)

    def predict(self, layer: int) -> list[int]:
        """Return the experts with at least `MIN_CHANCE` of being needed, likeliest first."""
        predicted = self._predicted[layer] = self._combined(layer)
        order = np.argsort(-predicted.chances, kind="stable")
        ranked: list[int] = order[: np.count_nonzero(predicted.chances >= MIN_CHANCE)].tolist()
        return ranked

    def _combined(self, layer: int) -> _Predicted:
        """Combine the predictions of all predictors for a layer."""
        places = np.full((len(self._members), self._num_experts), _NUM_PLACES + 1)
        for row, member in zip(places, self._members, strict=True):
            listed = member.predict(layer)
            row[listed] = np.minimum(np.arange(len(listed)), _NUM_PLACES)
        chance = np.clip(self._needed / self._listed, _LEAST, 1 - _LEAST)
        odds = np.log(chance / (1 - chance))
        mean = np.clip(self._needed.sum(axis=1) / self._listed.sum(axis=1), _LEAST, 1 - _LEAST)
        base = np.log(mean / (1 - mean))
        adds = np.take_along_axis(odds, places, axis=1) - base[:, None]
        return _Predicted(places, 1 / (1 + np.exp(-(base.mean() + self._weights @ adds))), adds)

    def _learn(self, predicted: _Predicted, is_needed: NDArray[np.float64]) -> None:
        self._weights += _RATE * ((is_needed - predicted.chances) * predicted.adds).mean(axis=1)
        for member, row in enumerate(predicted.places):
            self._needed[member] = self._needed[member] * _DECAY + np.bincount(row, is_needed, _NUM_PLACES + 2)
            self._listed[member] = self._listed[member] * _DECAY + np.bincount(row, minlength=_NUM_PLACES + 2)
