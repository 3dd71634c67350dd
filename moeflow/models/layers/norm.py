"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

from torch import Tensor

from moeflow.kernels.norm import rms_norm
from moeflow.models.layers.placement import Placement


class RMSNorm:
    """Normalises over the last dimension."""

    def __init__(self, place: Placement, size: int, eps: float) -> None:
        self.weight = place.empty(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [..., size] -> the same."""
        return rms_norm(x, self.weight, self.eps)
