"""A linear layer whose output features come from one or several checkpoint tensors, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array, split
from moeflow.kernels.linear import linear, norm_linear
from moeflow.kernels.on_demand import torch
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.weight_allocator import WeightAllocator, rows_of
from moeflow.parallel.blocks import shifted
from moeflow.parallel.columns import Columns

if TYPE_CHECKING:
    from torch import Tensor


class Linear:
    """`x @ weight.T + bias`.

    `parts` gives the output features of each part under its checkpoint name: {"q_proj": 576, "k_proj": 192, ...}.
    One product instead of several reads the input once and keeps the cores busy on narrow parts. `own` are this rank's
    output features of each part, if it has only some: then the output has only these.
    """

    def __init__(
        self,
        allocator: WeightAllocator,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        own: Mapping[str, range] | None = None,
    ) -> None:
        self.parts = dict(parts)
        self._own = own
        out_features = sum(self.parts.values())
        self.weight = allocator.stacked(self.parts, in_features, own)
        self._bias = allocator.empty(out_features) if bias else None  # small: ranks have all of it

    @property
    def bias(self) -> Array | None:
        """The bias of this rank's output features."""
        rows = None if self._bias is None else self._own_rows()
        if self._bias is None or rows is None:
            return self._bias
        return torch.cat([self._bias[part.start : part.stop] for part in rows])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the parts side by side, plus the residual. Shapes: x [T, in], residual [T, out] -> [T, out]."""
        return linear(x, self.weight, self.bias, residual)

    def after_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Do the same to `norm(x)`."""
        return norm_linear(x, norm.weights, self.weight, self.bias)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield each part's checkpoint name and the rows it is loaded into."""
        sizes = list(self.parts.values())
        own = [range(size) for size in sizes] if self._own is None else self._own.values()
        for name, rows in zip(self.parts, rows_of(self.weight, own), strict=True):
            yield f"{prefix}.{name}.weight", rows
        if self._bias is not None:
            for name, values in zip(self.parts, split(self._bias, sizes), strict=True):
                yield f"{prefix}.{name}.bias", values

    def _own_rows(self) -> list[range] | None:
        """Return which rows of the stacked parts this rank has; None: all."""
        if self._own is None:
            return None
        starts = accumulate(self.parts.values(), initial=0)
        return [shifted(self._own[name], start) for name, start in zip(self.parts, starts, strict=False)]


class GatheredLinear(Linear):
    """A linear layer of whose output features each rank computes a block, and gets all."""

    def __init__(
        self, allocator: WeightAllocator, in_features: int, name: str, columns: Columns, *, bias: bool = False
    ) -> None:
        """Take how the output features are cut."""
        super().__init__(allocator, in_features, {name: columns.count}, bias=bias, own={name: columns.own})
        self._columns = columns

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return all output features; see `Linear`. Blocks: until the other ranks are through. Raises: GroupError."""
        return self._columns.gather(super().__call__(x, None if residual is None else self._columns.of(residual)))


def output_linear(
    allocator: WeightAllocator, in_features: int, name: str, out_features: int, *, bias: bool = False
) -> Linear:
    """Return a linear layer that writes to the residual stream, which all ranks have whole."""
    columns = allocator.columns(name, out_features)
    if columns is None:
        return Linear(allocator, in_features, {name: out_features}, bias=bias)
    return GatheredLinear(allocator, in_features, name, columns, bias=bias)
