"""Evicts the expert with the latest expected next use, by an online model of the routers' choices.

Layers follow in order. So an expert's next use is a known number of layers away, plus as many passes as its layer
probably does without it. The probability of a use is a logistic regression on decayed counts of uses with several
half-lives. It learns from the same passes, so it fits models with sticky choices as well as even ones.

Where a pass needs more experts than there are slots, policies that only look back evict the experts that are needed
next.

This approximates Belady's rule by prediction, as in "Learning Relaxed Belady for Content Distribution Network Caching"
(Song et al., NSDI 2020). In addition, the order of layers is known here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.experts.cache.eviction import EvictionPolicy, Experts, Scores

_HALF_LIVES: Final = np.array([[4.0], [16.0], [64.0], [256.0]])  # of a use, in passes
_PRIOR_PASSES: Final = 2.0  # with mean use of each expert
_LEAST_RATE: Final = 1e-3  # of uses, and the least rate of none
_LEARNING_RATE: Final = 0.1
_FIRST_SQUARES: Final = 0.01  # of gradients
_LARGEST_LOG_ODDS: Final = 12.0

Floats = NDArray[np.float64]


class NextUse(EvictionPolicy):
    """Scores experts by minus the expected number of layers until their next use."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """`num_experts` is the number in a layer."""
        total = num_layers * num_experts
        self._num_layers, self._num_experts = num_layers, num_experts
        self._layers = np.repeat(np.arange(num_layers), num_experts)
        self._counts = np.zeros((len(_HALF_LIVES), total))
        self._num_passes = np.zeros((len(_HALF_LIVES), 1))  # decayed as well
        self._weights = np.append(np.full(len(_HALF_LIVES), 1 / len(_HALF_LIVES)), 0.0)  # of the features, and a bias
        self._squares = np.full(len(self._weights), _FIRST_SQUARES)
        self._now = -1  # the pass of the values below
        self._used = np.zeros(total, bool)
        self._layer = -1  # the last used one
        self._features = self._log_odds_of_uses(self._counts, self._num_passes)  # before the pass
        self._scores: dict[bool | None, Scores] = {}  # whether the pass used an expert; None: not yet known

    def on_use(self, experts: Experts, now: int) -> None:
        """Store them, and the progress of the pass."""
        self._begin(now)
        if len(experts):
            self._used[experts] = True
            self._layer = max(self._layer, int(experts.max()) // self._num_experts)

    def scores(self, now: int) -> Scores:
        """Return minus the expected number of layers until the next use, counted from the pass's first layer."""
        self._begin(now)
        used, unused = self.scores_behind(now)
        behind = np.where(self._used, used, unused)
        return np.where(self._layers <= self._layer, behind, self._scored(None))

    def scores_behind(self, now: int) -> tuple[Scores, Scores]:
        """See `EvictionPolicy.scores_behind`."""
        self._begin(now)
        return self._scored(True), self._scored(False)

    def _begin(self, now: int) -> None:
        """If this is a new pass, learn from the previous one, and count its uses."""
        if now == self._now:
            return
        if self._now >= 0:
            self._learn()
            decay = 0.5 ** ((now - self._now) / _HALF_LIVES)
            self._counts = self._counts * decay + self._used
            self._num_passes = self._num_passes * decay + 1
            self._features = self._log_odds_of_uses(self._counts, self._num_passes)
        self._now, self._layer = now, -1
        self._used[:] = False
        self._scores.clear()

    def _learn(self) -> None:
        """Make a step of logistic regression, by AdaGrad (Duchi et al. 2011)."""
        errors = _sigmoid(self._log_odds(self._features)) - self._used
        gradient = np.append(self._features @ errors, errors.sum()) / len(errors)
        self._squares += gradient**2
        self._weights -= _LEARNING_RATE * gradient / np.sqrt(self._squares)

    def _scored(self, is_used: bool | None) -> Scores:
        """Return the scores of experts that the pass has used, has not used, or has yet to reach (None)."""
        if is_used not in self._scores:
            if is_used is None:
                features = self._features
            else:
                decay = 0.5 ** (1 / _HALF_LIVES)
                features = self._log_odds_of_uses(self._counts * decay + is_used, self._num_passes * decay + 1)
            next_visit = self._layers + (0 if is_used is None else self._num_layers)
            # (1 - p) / p, the expected number of passes without a use, is the negative exponential of the log-odds.
            self._scores[is_used] = -(next_visit + self._num_layers * np.exp(-self._log_odds(features)))
        return self._scores[is_used]

    def _log_odds(self, features: Floats) -> Floats:
        found: Floats = self._weights[:-1] @ features + self._weights[-1]
        return found.clip(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)

    def _log_odds_of_uses(self, counts: Floats, num_passes: Floats) -> Floats:
        """Return features. Shapes: counts [half-lives, experts], num_passes [half-lives, 1] -> as counts."""
        mean = self._counts.mean(axis=1, keepdims=True) / np.maximum(self._num_passes, _LEAST_RATE)
        rates = (counts + _PRIOR_PASSES * mean) / (num_passes + _PRIOR_PASSES)
        rates = rates.clip(_LEAST_RATE, 1 - _LEAST_RATE)
        log_odds: Floats = np.log(rates / (1 - rates))
        return log_odds


def _sigmoid(log_odds: Floats) -> Floats:
    return 1 / (1 + np.exp(-log_odds))
