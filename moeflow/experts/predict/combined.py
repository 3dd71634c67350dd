"""Asks several predictors and weighs what they say by how often each was right: learnt online, from the traffic itself.

What a place in a predictor's list is worth is counted: the log-odds that the expert there is needed. An expert's
log-odds are the sum over predictors, each with a weight that is learnt by logistic regression, one step a layer and
pass: so predictors that say the same do not count twice, and one that is no use here counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.network_names import NetworkNames
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import Predictor, RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

MIN_CHANCE: Final = 0.25  # of being needed; of less likely experts, most reads would be in vain
_NUM_PLACES: Final = 16  # of a list that are told apart; behind them, one for the rest and one for what is not listed
_DECAY: Final = 0.5 ** (1 / 256)  # of counts, a pass: the text changes
_LEAST: Final = 1e-3  # chance of anything, and of its opposite
_RATE: Final = 0.02  # of learning weights


class _Said(msgspec.Struct, frozen=True):
    """What was said of a layer. Shapes: places [members, E] int64, of each expert in each list; chances [E], of being
    needed; adds [members, E], what each predictor adds to the log-odds.
    """

    places: NDArray[np.int64]
    chances: NDArray[np.float64]
    adds: NDArray[np.float64]


class CombinedPredictor(Predictor):
    """The next layer's router where it has been asked, the pass before, how often experts are used, and a network."""

    def __init__(self, model: RoutedModel) -> None:
        super().__init__(model)
        kinds: list[type[Predictor]] = [PreviousTokenPredictor, FrequencyPredictor]
        kinds += [NextRouter] if model.routers else []
        kinds += [NetworkNames] if model.has_network else []
        self._members = [kind(model) for kind in kinds]
        self._num_experts = model.num_experts
        size = (len(self._members), _NUM_PLACES + 2)
        self._needed = np.full(size, 0.5)  # times that an expert in a place was needed, decayed
        self._listed = np.ones(size)  # times that there was one, likewise
        self._weights = np.full(len(self._members), 1 / len(self._members))
        self._said: list[_Said | None] = [None] * model.num_layers  # of layers to come, as last asked

    def expect(self, named: Sequence[Sequence[int]]) -> None:
        """Let all predictors know what a network says."""
        for member in self._members:
            member.expect(named)

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Learn from what was said of the layer, then let all predictors see what it chose."""
        is_needed = np.zeros(self._num_experts)
        is_needed[np.asarray(expert_ids, dtype=np.int64)] = 1
        self._learn(self._said[layer] or self._asked(layer), is_needed)
        self._said[layer] = None
        for member in self._members:
            member.observe(layer, expert_ids)

    def observe_input(self, layer: int, hidden: Any) -> None:
        """Let all predictors see a layer's input [T, H]."""
        for member in self._members:
            member.observe_input(layer, hidden)

    def predict(self, layer: int) -> list[int]:
        """Return the experts that are needed with `MIN_CHANCE` or more, likeliest first."""
        said = self._said[layer] = self._asked(layer)
        order = np.argsort(-said.chances, kind="stable")
        ranked: list[int] = order[: np.count_nonzero(said.chances >= MIN_CHANCE)].tolist()
        return ranked

    def _asked(self, layer: int) -> _Said:
        """Ask all predictors about a layer."""
        places = np.full((len(self._members), self._num_experts), _NUM_PLACES + 1)
        for row, member in zip(places, self._members, strict=True):
            listed = member.predict(layer)
            row[listed] = np.minimum(np.arange(len(listed)), _NUM_PLACES)
        chance = np.clip(self._needed / self._listed, _LEAST, 1 - _LEAST)
        odds = np.log(chance / (1 - chance))
        mean = np.clip(self._needed.sum(axis=1) / self._listed.sum(axis=1), _LEAST, 1 - _LEAST)
        base = np.log(mean / (1 - mean))
        adds = np.take_along_axis(odds, places, axis=1) - base[:, None]
        return _Said(places, 1 / (1 + np.exp(-(base.mean() + self._weights @ adds))), adds)

    def _learn(self, said: _Said, is_needed: NDArray[np.float64]) -> None:
        self._weights += _RATE * ((is_needed - said.chances) * said.adds).mean(axis=1)
        for member, row in enumerate(said.places):
            self._needed[member] = self._needed[member] * _DECAY + np.bincount(row, is_needed, _NUM_PLACES + 2)
            self._listed[member] = self._listed[member] * _DECAY + np.bincount(row, minlength=_NUM_PLACES + 2)
