"""SparseMax: the Euclidean projection of scores on the probability simplex, which gives most of them exactly nothing.

Source: Martins & Astudillo 2016, "From Softmax to Sparsemax", 1602.02068: algorithm 1; equation 14 for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sparsemax(scores: Tensor) -> Tensor:
    """Return weights, at least 0, that add up to 1 along the last dimension. Scores may be -inf, but not all of a row.

    Shapes: scores [..., N] -> [..., N].
    """
    weights: Tensor = _Sparsemax.apply(scores)  # type: ignore[no-untyped-call]
    return weights


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """Subtract the threshold tau from each score, and cut at 0."""
        scores = scores - scores.amax(-1, keepdim=True)
        ordered = scores.sort(dim=-1, descending=True).values
        sums = ordered.cumsum(-1) - 1
        ranks = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype, device=scores.device)
        support_size = (ranks * ordered > sums).sum(-1, keepdim=True)
        tau = sums.gather(-1, support_size - 1) / support_size
        weights = (scores - tau).clamp(min=0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Take the mean gradient of the support from its own; nothing reaches scores outside it."""
        (weights,) = ctx.saved_tensors
        (gradient,) = gradients
        is_in = weights > 0
        mean = (gradient * is_in).sum(-1, keepdim=True) / is_in.sum(-1, keepdim=True)
        return torch.where(is_in, gradient - mean, torch.zeros_like(gradient))
