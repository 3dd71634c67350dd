"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

from torch import Tensor, nn

from moeflow.kernels.norm import rms_norm
from moeflow.layers.placement import Placement


class RMSNorm(nn.Module):
    """Normalises over the last dimension."""

    def __init__(self, place: Placement, size: int, eps: float) -> None:
        super().__init__()
        self.weight = place.empty(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [..., size] -> the same."""
        return rms_norm(x, self.weight, self.eps)
