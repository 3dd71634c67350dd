"""Routing that is as skewed as an experiment wants it: the router of the study of sliced experts (6.1.1).

A share of the tokens (`router_skew`) goes to the first few experts (`num_experts_skew`, the hot ones), the others to
the rest; among either, evenly. Purely by chance: ids depend on the seed, not on what tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SkewRouter:
    """A router with a given skew. The same one makes the same ids. Raises: ConfigError if a number makes no sense."""

    num_experts: int
    top_k: int
    router_skew: float  # share of the tokens that go to hot experts; num_experts_skew / num_experts: no skew
    num_experts_skew: int  # hot experts: the first
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"{self.top_k} experts a token cannot be taken from {self.num_experts}: take 1 to {self.num_experts}"
            )
        if not 0 <= self.router_skew <= 1:
            raise ConfigError(
                f"a share of {self.router_skew:g} of the tokens makes no sense: give a number from 0 to 1"
            )
        if not 1 <= self.num_experts_skew <= self.num_experts:
            raise ConfigError(
                f"{self.num_experts_skew} of {self.num_experts} experts cannot be hot: take 1 to {self.num_experts}"
            )

    def route(self, num_tokens: int) -> NDArray[np.int64]:
        """Return the experts of so many tokens, [T, K], none twice for a token.

        A token that needs more experts than its kind has takes all of them, and others besides. With more skew and the
        same seed, some tokens change from the rest to the hot experts, and no other changes.
        """
        random = np.random.default_rng(self.seed)
        is_hot = random.random(num_tokens) < self.router_skew
        num_hot = self.num_experts_skew
        hot = self._draw(random, num_tokens, range(num_hot), range(num_hot, self.num_experts))
        cold = self._draw(random, num_tokens, range(num_hot, self.num_experts), range(num_hot))
        return np.where(is_hot[:, None], hot, cold)

    def _draw(self, random: np.random.Generator, num_tokens: int, first: range, others: range) -> NDArray[np.int64]:
        """Return K experts for each token: of the first, and of others what those are too few for."""
        num_first = min(self.top_k, len(first))
        taken = _distinct(random, num_tokens, num_first, len(first)) + first.start
        besides = _distinct(random, num_tokens, self.top_k - num_first, len(others)) + others.start
        return np.concatenate([taken, besides], axis=1)


def _distinct(random: np.random.Generator, num_rows: int, number: int, limit: int) -> NDArray[np.int64]:
    """Return so many different numbers below `limit` in each row, all choices alike likely (Floyd's algorithm)."""
    chosen = np.empty((num_rows, number), np.int64)
    for column, last in enumerate(range(limit - number, limit)):
        drawn = random.integers(0, last + 1, num_rows)
        is_taken = (chosen[:, :column] == drawn[:, None]).any(axis=1)
        chosen[:, column] = np.where(is_taken, last, drawn)
    return chosen
