"""Choosing tokens from logits: the likeliest, or by temperature, top-k, top-p, min-p, and the cumulative distribution
inverted at a number.

Each row by itself. A token whose weight is zero is never sampled: one at -inf, or less likely than MIN_WEIGHT times
the likeliest. The extension sums in float64. The order depends on the size of the row only, so a row's token is the
same in any batch. Weights are float32 and may differ in their last bits between instruction sets and NumPy. A token can
differ only if the number falls on the border between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import on_host
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.triton import launching

with on_demand(__name__):
    from moeflow.kernels import device_sample

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]

MIN_WEIGHT: Final = 1.3e-38  # about the smallest normal float32
NUCLEUS_WIDTH = 1024  # likeliest tokens that top-p looks at before it sorts a whole row: 8x cheaper at V = 49152


class RowSampling(NamedTuple):
    """How one token is to be sampled from a row of logits."""

    row: int  # of the logits
    temperature: float = 0.0  # 0: the likeliest token, of equals the first; else so large that its inverse is a float32
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # relative to the likeliest token
    number: float = 0.0  # in [0, 1): where in the cumulative distribution the token lies


def sample_rows(logits: Any, samplings: Sequence[RowSampling]) -> list[int]:
    """Return for each sampling the first token whose cumulative weight exceeds its number's share of the total.

    Tokens count in the order of the vocabulary, or under top-k or top-p likeliest first, and of equals the lower
    number. All likelihoods include the temperature. top-p applies to the tokens left by top-k, then min-p restricts
    further. -1: the row's maximum is no finite number, or it has a NaN.

    Shapes: logits [R, V] float32; not changed.
    """
    if not samplings:
        return []
    if row_ops.accepts(logits):
        return row_ops.sample(logits, samplings)
    if launching.accepts(logits):
        return device_sample.sample(logits, samplings, device_sample.Limits(MIN_WEIGHT, NUCLEUS_WIDTH))[0]
    rows = on_host(logits)
    return [_sample_row(rows[one.row], one) for one in samplings]


def _sample_row(logits: Floats, one: RowSampling) -> int:
    """Shapes: logits [V]."""
    likeliest_token = int(logits.argmax())  # a NaN, if there is one
    max_logit = logits[likeliest_token]
    if not np.isfinite(max_logit):
        return -1
    if one.temperature == 0.0:
        return likeliest_token
    scores = (logits - max_logit) * np.float32(1 / one.temperature)
    if one.top_k == 0 and one.top_p == 1.0:
        weights = np.exp(scores)
        weights[weights < max(one.min_p, MIN_WEIGHT)] = 0.0
        return _invert(weights.astype(np.float64), one.number)
    if one.top_k > 0:
        tokens = likeliest(scores, one.top_k)
        weights = np.exp(scores[tokens]).astype(np.float64)
        return int(tokens[_sample_sorted(weights, weights.sum(), one)])
    mass = np.exp(scores).sum(dtype=np.float64)
    tokens = likeliest(scores, NUCLEUS_WIDTH)
    weights = np.exp(scores[tokens]).astype(np.float64)
    if weights.sum() < mass * one.top_p:  # the nucleus is wider
        tokens = likeliest(scores, len(scores))
        weights = np.exp(scores[tokens]).astype(np.float64)
    return int(tokens[_sample_sorted(weights, mass, one)])


def likeliest(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Return the tokens of the highest scores [V], highest first, of equals the lower number: [count], or [V]."""
    if count < len(scores):
        lowest = np.partition(scores, -count)[-count]
        above, equal = np.flatnonzero(scores > lowest), np.flatnonzero(scores == lowest)
        tokens = np.concatenate([above, equal[: count - len(above)]])
    else:
        tokens = np.arange(len(scores))
    return tokens[np.argsort(-scores[tokens], kind="stable")]


def _sample_sorted(weights: Doubles, mass: np.float64, one: RowSampling) -> int:
    """Apply top-p and min-p to weights [C], likeliest first, that are parts of a mass; then sample one of them."""
    outside = weights < max(one.min_p, MIN_WEIGHT)
    if one.top_p < 1.0:
        outside |= weights.cumsum() - weights >= one.top_p * mass
    outside[0] = False
    return _invert(np.where(outside, 0.0, weights), one.number)


def _invert(weights: Doubles, number: float) -> int:
    """Return where the cumulative weight first exceeds the number's share. Shapes: weights [C] float64.

    Summed in float64: in float32 the error over a large vocabulary is as big as a rare token.
    """
    cumulative = weights.cumsum()
    total = cumulative[-1]
    threshold = min(number * total, np.nextafter(total, 0.0))  # however it rounds
    return int(np.searchsorted(cumulative, threshold, side="right"))
