"""Routers with hot experts, and a token's chance to reach each rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import ConfigError
from moeflow.planner.costs.expected_routing import ExpectedRouting, TokenKind, Values


def skewed_routing(num_experts: int, top_k: int, hot_share: float, num_hot: int) -> ExpectedRouting:
    """Return routers that send a share of the tokens to the first `num_hot` experts, and the others to the rest.

    A token takes experts of its kind, evenly, and others only if its kind has fewer than K. This is the skew of the
    study of sliced experts (6.1.1). Raises: ConfigError if there are fewer experts than are hot.
    """
    if not 1 <= num_hot <= num_experts:
        raise ConfigError(f"{num_hot} of {num_experts} experts cannot be hot: take 1 to {num_experts}")
    is_hot = np.arange(num_experts) < num_hot
    kinds = [_first(kind, top_k) for share, kind in ((hot_share, is_hot), (1 - hot_share, ~is_hot)) if share]
    return ExpectedRouting(np.array([share for share in (hot_share, 1 - hot_share) if share]), np.array(kinds))


def reached_ranks(routing: ExpectedRouting, served: Values) -> Values:
    """Return a token's chance to reach each rank, [P], which serves shares of the experts' tokens, [P, E]."""
    missed = np.zeros(len(served))
    for share, rates in zip(routing.shares, routing.rates, strict=True):
        missed += share * _missed(TokenKind.of(rates), served)
    return 1 - missed


def _missed(kind: TokenKind, served: Values) -> Values:
    """Return a token's chance to miss each rank, [P]."""
    missed: Values = (1 - served[:, kind.is_certain]).prod(axis=1)
    if kind.num_drawn:
        part = served @ kind.rates / kind.num_drawn * kind.num_open  # of the open experts, [P]
        for before in range(kind.num_drawn):
            missed = missed * np.clip(1 - part / (kind.num_open - before), 0, 1)
    return missed


def _first(is_kind: NDArray[np.bool_], top_k: int) -> Values:
    """Return the chances of a token that takes K experts of its kind, and others if those are too few, [E]."""
    size, others = int(is_kind.sum()), int((~is_kind).sum())
    taken = min(top_k, size)
    return np.where(is_kind, taken / max(size, 1), (top_k - taken) / max(others, 1))
