"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, the mean taken in float32.

    Shapes: x [..., H], weight [H] -> [..., H] in x's dtype.
    """
    return F.rms_norm(x, weight.shape, weight, eps)
