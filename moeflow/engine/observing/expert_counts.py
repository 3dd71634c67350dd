"""How many tokens each expert of each layer got: since counting began, in the last minute, and in the last pass."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.core.observation import RoutedTokens

MINUTE_S: Final = 60
# Of the tokens that an expert got over the mean of its layer.
LOAD_BOUNDS: Final = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)

Counts = NDArray[np.int64]


class RoutedSum:
    """The tokens of some passes."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.tokens = 0
        self.tokens_of_layers: Counts = np.zeros(num_layers, np.int64)
        self.counts: Counts = np.zeros((num_layers, num_experts), np.int64)

    def add(self, other: RoutedSum) -> None:
        """Add the tokens of other passes."""
        self.tokens += other.tokens
        self.tokens_of_layers += other.tokens_of_layers
        self.counts += other.counts

    def subtract(self, other: RoutedSum) -> None:
        """Remove the tokens of passes that were added."""
        self.tokens -= other.tokens
        self.tokens_of_layers -= other.tokens_of_layers
        self.counts -= other.counts

    def as_message(self) -> RoutedTokens:
        """Return it as a message."""
        return RoutedTokens(self.tokens, self.tokens_of_layers.tolist(), self.counts.astype("<i8").tobytes())


class ExpertCounts:
    """The counts of one engine. Passes come in groups that ended within one second."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.num_passes = 0
        self.total = RoutedSum(num_layers, num_experts)
        self.last_pass = RoutedSum(num_layers, num_experts)
        self.loads: Counts = np.zeros(len(LOAD_BOUNDS) + 1, np.int64)
        self._minute = RoutedSum(num_layers, num_experts)
        self._seconds: deque[tuple[int, RoutedSum]] = deque()  # with the second of their ends, ascending

    def add(self, second: int, passes: RoutedSum, num_passes: int) -> None:
        """Count passes that ended in this second."""
        self._forget(second)
        self.num_passes += num_passes
        self.total.add(passes)
        self._minute.add(passes)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1].add(passes)
        else:
            self._seconds.append((second, passes))

    def add_load(self, counts: Counts, num_choices: int) -> None:
        """Count the loads of the experts of one pass and group of layers, if their mean is a token or more.

        Shapes: counts [layers, E], each row the parts of `num_choices`.
        """
        mean = num_choices / counts.shape[1]
        if mean >= 1:
            places = np.searchsorted(LOAD_BOUNDS, counts.ravel() / mean)
            self.loads += np.bincount(places, minlength=len(self.loads))

    def last_minute(self, second: int) -> RoutedSum:
        """Return the tokens of the 60 seconds up to this one, which is not over."""
        self._forget(second)
        return self._minute

    def _forget(self, second: int) -> None:
        """Remove passes that ended a minute before this second, or earlier."""
        while self._seconds and self._seconds[0][0] <= second - MINUTE_S:
            self._minute.subtract(self._seconds.popleft()[1])
