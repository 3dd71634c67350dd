"""A linear layer whose output features come from one or several checkpoint tensors, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from moeflow.kernels.linear import linear, norm_linear
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.norm import RMSNorm
from moeflow.models.layers.weight_allocator import WeightAllocator, rows_of


class Linear:
    """`x @ weight.T + bias`.

    `parts` gives the output features of each part under its checkpoint name: {"q_proj": 576, "k_proj": 192, ...}.
    One product instead of several reads the input once and keeps the cores busy on narrow parts.
    """

    def __init__(
        self, allocator: WeightAllocator, in_features: int, parts: Mapping[str, int], *, bias: bool = False
    ) -> None:
        self.parts = dict(parts)
        out_features = sum(self.parts.values())
        self.weight = allocator.matrix(out_features, in_features)
        self.bias = allocator.empty(out_features) if bias else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the parts side by side, plus the residual. Shapes: x [T, in], residual [T, out] -> [T, out]."""
        return linear(x, self.weight, self.bias, residual)

    def after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Do the same to `norm(x)`."""
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield each part's checkpoint name and the rows it is loaded into."""
        sizes = list(self.parts.values())
        for name, rows in zip(self.parts, rows_of(self.weight, sizes), strict=True):
            yield f"{prefix}.{name}.weight", rows
        if self.bias is not None:
            for name, rows in zip(self.parts, rows_of(self.bias, sizes), strict=True):
                yield f"{prefix}.{name}.bias", rows
