"""Asks several predictors and weighs what they say by how often each was right: learnt online, from the traffic itself.

What a place in a predictor's list is worth is counted: the log-odds that the expert there is needed. An expert's
log-odds are the sum over predictors, each with a weight that is learnt by logistic regression, one step a layer and
pass: so predictors that say the same do not count twice, and one that is no use here counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import Predictor, RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

if TYPE_CHECKING:
    from torch import Tensor

MIN_CHANCE: Final = 0.25  # of being needed; of less likely experts, most reads would be in vain
_NUM_PLACES: Final = 16  # of a list that are told apart; behind them, one for the rest and one for what is not listed
_DECAY: Final = 0.5 ** (1 / 256)  # of counts, a pass: the text changes
_LEAST: Final = 1e-3  # chance of anything, and of its opposite
_RATE: Final = 0.02  # of learning weights


class CombinedPredictor(Predictor):
    """The next layer's router where it has been asked, the pass before, and how often experts are used."""

    def __init__(self, model: RoutedModel) -> None:
        kinds = (PreviousTokenPredictor, FrequencyPredictor, *((NextRouter,) if model.routers else ()))
        self._members: list[Predictor] = [kind(model) for kind in kinds]
        self._num_experts = model.num_experts
        size = (len(self._members), _NUM_PLACES + 2)
        self._needed = np.full(size, 0.5)  # times that an expert in a place was needed, decayed
        self._listed = np.ones(size)  # times that there was one, likewise
        self._weights = np.full(len(self._members), 1 / len(self._members))
        self._places = [
            np.zeros((0, 0), dtype=np.int64) for _ in range(model.num_layers)
        ]  # [members, E], as last asked

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Learn from what was said of the layer, then let all predictors see what it chose."""
        is_needed = np.zeros(self._num_experts)
        is_needed[np.asarray(expert_ids, dtype=np.int64)] = 1
        if not self._places[layer].size:
            self._places[layer] = self._placed(layer)
        self._learn(self._places[layer], is_needed)
        self._places[layer] = self._places[layer][:0]
        for member in self._members:
            member.observe(layer, expert_ids)

    def observe_input(self, layer: int, hidden: Tensor) -> None:
        """Let all predictors see a layer's input [T, H]."""
        for member in self._members:
            member.observe_input(layer, hidden)

    def predict(self, layer: int) -> list[int]:
        """Return the experts that are needed with `MIN_CHANCE` or more, likeliest first."""
        places = self._places[layer] = self._placed(layer)
        chances = self._chances(places)[0]
        order = np.argsort(-chances, kind="stable")
        ranked: list[int] = order[: np.count_nonzero(chances >= MIN_CHANCE)].tolist()
        return ranked

    def _placed(self, layer: int) -> NDArray[np.int64]:
        """Return each expert's place in each list: [members, E]."""
        places = np.full((len(self._members), self._num_experts), _NUM_PLACES + 1)
        for row, member in zip(places, self._members, strict=True):
            listed = member.predict(layer)
            row[listed] = np.minimum(np.arange(len(listed)), _NUM_PLACES)
        return places

    def _chances(self, places: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return how likely each expert is needed, [E], and what each predictor adds to its log-odds, [members, E]."""
        chance = np.clip(self._needed / self._listed, _LEAST, 1 - _LEAST)
        odds = np.log(chance / (1 - chance))
        mean = np.clip(self._needed.sum(axis=1) / self._listed.sum(axis=1), _LEAST, 1 - _LEAST)
        base = np.log(mean / (1 - mean))
        adds = np.take_along_axis(odds, places, axis=1) - base[:, None]
        return 1 / (1 + np.exp(-(base.mean() + self._weights @ adds))), adds

    def _learn(self, places: NDArray[np.int64], is_needed: NDArray[np.float64]) -> None:
        chances, adds = self._chances(places)
        self._weights += _RATE * ((is_needed - chances) * adds).mean(axis=1)
        for member, row in enumerate(places):
            self._needed[member] = self._needed[member] * _DECAY + np.bincount(row, is_needed, _NUM_PLACES + 2)
            self._listed[member] = self._listed[member] * _DECAY + np.bincount(row, minlength=_NUM_PLACES + 2)
