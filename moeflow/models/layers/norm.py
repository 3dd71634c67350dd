"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

from torch import Tensor

from moeflow.kernels.norm import rms_norm
from moeflow.models.layers.weight_allocator import WeightAllocator


class RMSNorm:
    """Normalises over the last dimension."""

    def __init__(self, allocator: WeightAllocator, size: int, eps: float) -> None:
        self.weight = allocator.empty(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [..., size] -> the same."""
        return rms_norm(x, self.weight, self.eps)
