"""The expected choices of routers: the experts that tokens reach, and the imbalance of ranks.

Tokens are independent and of few kinds; a token of a kind takes K different experts at given rates. The formulas come
from first principles and are exact for kinds that choose evenly among some experts:

- distinct experts with their variance: the chances that B tokens miss one expert, or two;
- pairs at a rank: each token takes two experts as often as without replacement;
- ranks that a token reaches: hypergeometric.

Approximate: the largest of several counts, taken as independent with the right means and spread. Nothing is sampled or
fitted. Knows no machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float64]

LARGEST_COUNT: Final = 512  # from which on counts are taken as normal
GRID: Final = 256  # points of an integral
DEVIATIONS: Final = 6.0  # beyond which nothing is expected
LEAST_SPREAD: Final = 1e-6  # variance over mean; a count without any chance cannot be computed with
MOST_TRIALS: Final = 1e6


class ExpectedRouting(msgspec.Struct, frozen=True, dict=True):
    """Routers as shares of the kinds of tokens, [C], and their chances to take each expert, [C, E]."""

    shares: Values
    rates: Values  # each row's sum is K

    @classmethod
    def of_loads(cls, loads: Values, top_k: int) -> ExpectedRouting:
        """Return routers under which experts have had these loads, [E], of any unit: tokens of one kind."""
        loads = loads + (loads.sum() or 1.0) * 1e-9  # even where nothing is known
        rates = np.zeros(len(loads))
        while (rates < 1).any() and (missing := top_k - rates.sum()) > 1e-9:
            is_open = rates < 1
            rates[is_open] = np.minimum(loads[is_open] * (missing + rates[is_open].sum()) / loads[is_open].sum(), 1)
        return cls(np.ones(1), rates[None])

    @cached_property
    def top_k(self) -> int:
        """K."""
        return round(float(self.rates[0].sum()))

    @cached_property
    def chances(self) -> Values:
        """A token's chance to take each expert, [E]."""
        return self.shares @ self.rates

    @cached_property
    def both(self) -> Values:
        """A token's chance to take both of two experts, [E, E]; on the diagonal, the one."""
        total = np.zeros((self.rates.shape[1],) * 2)
        for share, rates in zip(self.shares, self.rates, strict=True):
            kind = TokenKind.of(rates)
            together = np.outer(rates, rates)
            together[np.ix_(~kind.is_certain, ~kind.is_certain)] *= kind.pair_factor
            total += share * together
        np.fill_diagonal(total, self.chances)
        return total

    def distinct(self, tokens: Values) -> tuple[float, float]:
        """Return mean and variance of the number of experts reached, each by so many of the tokens, [E].

        The tokens of one expert are a subset of the other's, for any two experts. An expert with no tokens does not
        count.
        """
        none = (1 - self.chances) ** tokens
        fewer, more = np.minimum(tokens, tokens[:, None]), np.abs(tokens - tokens[:, None])
        neither = np.clip(1 - self.chances - self.chances[:, None] + self.both, 0, 1)
        rarer = np.where(tokens > tokens[:, None], self.chances, self.chances[:, None])
        covariance = neither**fewer * (1 - rarer) ** more - np.outer(none, none)
        return float((1 - none).sum()), max(float(covariance.sum()), 0.0)

    def pairs(self, served: Values) -> tuple[float, float]:
        """Return mean and variance of the experts of one token that are served, each for a share of the tokens, [E]."""
        mean = float(self.chances @ served)
        square = float((self.both * np.minimum(served, served[:, None])).sum())
        return mean, max(square - mean**2, 0.0)


class TokenKind(msgspec.Struct, frozen=True):
    """Tokens that always take some experts, and others by chance."""

    is_certain: NDArray[np.bool_]  # [E]
    rates: Values  # of the others, [E]
    num_drawn: int  # of the others
    num_open: float  # from how many these are drawn, were they all alike

    @classmethod
    def of(cls, rates: Values) -> TokenKind:
        """Return the kind of tokens with these chances to take each expert, [E]."""
        is_certain = rates > 1 - 1e-9
        rest = np.where(is_certain, 0.0, rates)
        drawn = round(float(rest.sum()))
        return cls(is_certain, rest, drawn, drawn**2 / float(rest @ rest) if drawn else 1.0)

    @property
    def pair_factor(self) -> float:
        """How much more often a token takes two of the others than by independent chances."""
        return self.num_open * (self.num_drawn - 1) / (self.num_drawn * (self.num_open - 1)) if self.num_drawn else 1.0


def expected_max(means: Values, variances: Values, *, is_any: bool = False) -> float:
    """Return the expected largest of independent counts; `is_any`: given that not all are 0.

    Small counts have the distribution of Panjer's class (binomial, Poisson or negative binomial) with their mean and
    variance; large ones are normal.
    """
    some = means > 0
    if not some.any():
        return 0.0
    spread = np.maximum(variances[some], LEAST_SPREAD * means[some])
    cases, numbers = np.unique(np.column_stack([means[some], spread]), axis=0, return_counts=True)
    limit = float((cases[:, 0] + DEVIATIONS * np.sqrt(cases[:, 1])).max()) + DEVIATIONS
    if limit > LARGEST_COUNT:
        return _normal_max(cases, numbers)
    below = (_panjer(cases, math.ceil(limit)) ** numbers[:, None]).prod(axis=0)
    return float((1 - below).sum() / (1 - below[0] if is_any else 1))


def _panjer(cases: Values, limit: int) -> Values:
    """Return the chance that each count is at most 0, 1, ..., [cases, limit + 1]: p(k) = p(k-1) (a + b / k).

    A count that varies less than it is large is of a whole number of trials, so that 2 of 2 is never 3.
    """
    mean, variance = cases.T[:, :, None]
    trials = np.ceil(mean**2 / np.maximum(mean - variance, mean / MOST_TRIALS) - 0.5)
    trials = np.maximum(trials, np.ceil(mean - LEAST_SPREAD))
    odds = mean / np.maximum(trials - mean, LEAST_SPREAD)
    is_binomial = variance < mean
    slope = np.where(is_binomial, -odds, 1 - mean / variance)  # a
    offset = np.where(is_binomial, (trials + 1) * odds, mean**2 / variance - slope)  # b
    factors = np.maximum(slope + offset / np.arange(1, limit + 1), 1e-300)
    logs = np.concatenate([np.zeros((len(cases), 1)), np.log(factors).cumsum(axis=1)], axis=1)
    chances = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.cumsum(chances / chances.sum(axis=1, keepdims=True), axis=1)


def _normal_max(cases: Values, numbers: NDArray[np.int64]) -> float:
    mean, deviation = cases[:, 0], np.sqrt(cases[:, 1])
    low = float((mean - DEVIATIONS * deviation).max())  # the largest count is above
    high = float((mean + DEVIATIONS * deviation).max())
    points = np.linspace(low, high, GRID)
    below = (_normal((points - mean[:, None]) / deviation[:, None]) ** numbers[:, None]).prod(axis=0)
    return low + float(np.trapezoid(1 - below, points))


_erf: Callable[[Values], Values] = np.vectorize(math.erf, otypes=[float])


def _normal(deviations: Values) -> Values:
    return (1 + _erf(deviations / math.sqrt(2))) / 2
