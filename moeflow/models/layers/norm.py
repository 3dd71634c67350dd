"""Norms with learned weights."""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.core.model_config import ModelConfig
from moeflow.kernels.arrays import Array
from moeflow.kernels.norm import NormWeights, add_normalised, normalise
from moeflow.models.layers.weight_allocator import WeightAllocator


class Norm:
    """Normalises over the last dimension: by the root mean square, or as a layer norm, perhaps with a bias."""

    def __init__(
        self,
        allocator: WeightAllocator,
        size: int,
        eps: float,
        *,
        subtracts_mean: bool = False,
        has_bias: bool = False,
        has_weight: bool = True,
    ) -> None:
        """Without weights the normalized values are not scaled, and checkpoints have no tensor."""
        self.weight = allocator.empty(size) if has_weight else allocator.ones(size)
        self._has_weight = has_weight
        self.bias = allocator.empty(size) if has_bias else None
        self.weights = NormWeights(self.weight, eps, subtracts_mean, self.bias)  # the same, for kernels

    @classmethod
    def of(cls, config: ModelConfig, allocator: WeightAllocator, *, has_weight: bool = True) -> Norm:
        """Return a norm of a model's hidden states."""
        return cls(
            allocator,
            config.hidden_size,
            config.norms.eps,
            subtracts_mean=config.norms.has_layer_norms,
            has_bias=config.norms.norm_bias,
            has_weight=has_weight,
        )

    def __call__(self, x: Array) -> Array:
        """Shapes: x [..., size] -> the same."""
        return normalise(x, self.weights)

    def add(self, hidden: Array, x: Array, factor: Array | None = None) -> Array:
        """Return hidden states plus normalised x, times a factor. Shapes: hidden and x [T, size], factor [1]."""
        return add_normalised(hidden, x, self.weights, factor)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Array]]:
        """Yield (checkpoint name, destination)."""
        if self._has_weight:
            yield f"{prefix}.weight", self.weight
        if self.bias is not None:
            yield f"{prefix}.bias", self.bias
