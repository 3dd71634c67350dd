"""Sampling tokens from logits: temperature, top-k, top-p, min-p, and the cumulative distribution inverted at a number.

Each row by itself. A token whose weight is zero is never sampled: one at -inf, or less likely than MIN_WEIGHT times
the likeliest. The extension sums in float64 in an order that depends on the size of the row alone, so a row's token
is the same in any batch. Weights are float32 and may differ in their last bits between instruction sets and torch; a
token can then differ only where the number falls on the border between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeflow.kernels.cpu import row_ops

MIN_WEIGHT = 1.3e-38  # about the smallest normal float32
NUCLEUS_WIDTH = 1024  # likeliest tokens that top-p looks at before it sorts a whole row: 8x cheaper at V = 49152


class RowSampling(NamedTuple):
    """How one token is to be sampled from a row of logits."""

    row: int  # of the logits
    max_logit: float  # of the row; a finite number
    temperature: float  # above 0; so large that its inverse is a float32
    top_k: int  # 0: all
    top_p: float  # in (0, 1]
    min_p: float  # relative to the likeliest token
    number: float  # in [0, 1): where in the cumulative distribution the token lies


def sample_rows(logits: Tensor, samplings: Sequence[RowSampling]) -> list[int]:
    """Return for each sampling the first token whose cumulative weight exceeds its number's share of the total.

    Tokens count in the order of the vocabulary, or under top-k or top-p likeliest first, and of equals the lower
    number (torch: any). All likelihoods are those at the temperature; top-p takes its share of what top-k left, and
    min-p restricts further.

    Shapes: logits [R, V] float32; not changed.
    """
    if row_ops.accepts(logits):
        return row_ops.sample(logits, samplings)
    return [_sample_row(logits[one.row], one) for one in samplings]


def _sample_row(logits: Tensor, one: RowSampling) -> int:
    """Shapes: logits [V]."""
    scores = (logits - one.max_logit) * (1 / one.temperature)
    if one.top_k == 0 and one.top_p == 1.0:
        weights = scores.exp_()
        return _invert(weights.masked_fill_(weights < max(one.min_p, MIN_WEIGHT), 0.0).double(), one.number)
    if one.top_k > 0:
        values, tokens = scores.topk(min(one.top_k, scores.shape[-1]))
        weights = values.exp().double()
        return int(tokens[_sample_sorted(weights, weights.sum(), one)])
    mass = scores.exp().sum(dtype=torch.float64)
    values, tokens = scores.topk(min(NUCLEUS_WIDTH, scores.shape[-1]))
    weights = values.exp().double()
    if weights.sum() < mass * one.top_p:  # the nucleus is wider
        values, tokens = scores.sort(descending=True, stable=True)
        weights = values.exp().double()
    return int(tokens[_sample_sorted(weights, mass, one)])


def _sample_sorted(weights: Tensor, mass: Tensor, one: RowSampling) -> int:
    """Apply top-p and min-p to weights [C], likeliest first, that are parts of a mass; then sample one of them."""
    outside = weights < max(one.min_p, MIN_WEIGHT)
    if one.top_p < 1.0:
        outside |= weights.cumsum(-1) - weights >= one.top_p * mass
    outside[0] = False
    return _invert(weights.masked_fill(outside, 0.0), one.number)


def _invert(weights: Tensor, number: float) -> int:
    """Return where the cumulative weight first exceeds the number's share. Shapes: weights [C] float64.

    Summed in float64: in float32 the error over a large vocabulary is as big as a rare token.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[-1:]
    threshold = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))  # however it rounds
    return int(torch.searchsorted(cumulative, threshold, right=True))
