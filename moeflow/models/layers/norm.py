"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array
from moeflow.kernels.norm import rms_norm
from moeflow.models.layers.weight_allocator import WeightAllocator

if TYPE_CHECKING:
    pass


class RMSNorm:
    """Normalises over the last dimension."""

    def __init__(self, allocator: WeightAllocator, size: int, eps: float) -> None:
        self.weight = allocator.empty(size)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Shapes: x [..., size] -> the same."""
        return rms_norm(x, self.weight, self.eps)
