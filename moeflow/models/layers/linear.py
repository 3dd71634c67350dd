"""A linear layer whose output features come from one or several checkpoint tensors, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array, split
from moeflow.kernels.linear import linear, norm_linear
from moeflow.kernels.on_demand import torch
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.rearranged import Rearranged
from moeflow.models.layers.weight_allocator import StackedWeight, WeightAllocator, own_rows_of, rows_of
from moeflow.parallel.blocks import shifted
from moeflow.parallel.columns import Columns
from moeflow.parallel.group import Sums

if TYPE_CHECKING:
    from torch import Tensor


class Linear:
    """`x @ weight.T + bias`.

    `parts` gives the output features of each part under its checkpoint name: {"q_proj": 576, "k_proj": 192, ...}.
    One product instead of several reads the input once and keeps the cores busy on narrow parts. `own` are this rank's
    output features of each part, if it has only some: then the output has only these.

    `order` are the places of outputs in the order that the reader needs. Where the allocator rearranges weights, the
    output has that order. Else the reader has to apply what remains in `self.order`.
    """

    def __init__(
        self,
        allocator: WeightAllocator,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        own: Mapping[str, range] | None = None,
        order: Sequence[range] = (),
    ) -> None:
        self.parts = dict(parts)
        self._own = own
        runs = _runs_of(parts, order) if allocator.rearranges else []
        in_order = _stacked(runs, allocator)
        self._runs = runs if in_order else []
        self.order = () if in_order else order
        stacked = in_order or self.parts
        out_features = sum(stacked.values())
        self.weight = allocator.stacked(stacked, in_features, own)
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
        if self._runs:
            yield from self._rearranged(prefix, "weight", self.weight)
            if self._bias is not None:
                yield from self._rearranged(prefix, "bias", self._bias)
            return
        sizes = list(self.parts.values())
        for name, rows in zip(self.parts, self._destinations(), strict=True):
            yield f"{prefix}.{name}.weight", rows
        if self._bias is not None:
            for name, values in zip(self.parts, split(self._bias, sizes), strict=True):
                yield f"{prefix}.{name}.bias", values

    def _destinations(self) -> Sequence[Destination]:
        """Return the places of the parts' rows."""
        if self._own is None:
            return rows_of(self.weight, [range(size) for size in self.parts.values()])
        return own_rows_of(self.weight, list(self._own.values()))

    def _rearranged(self, prefix: str, kind: str, stacked: StackedWeight | Array) -> Iterator[tuple[str, Destination]]:
        """Yield each part's checkpoint name and the places of its rows, or of their biases."""
        runs = self._runs
        places = rows_of(stacked, [range(sum(map(len, rows))) for _, rows in runs])
        for name in self.parts:
            own = [(place, rows) for place, (owner, rows) in zip(places, runs, strict=True) if owner == name]
            yield f"{prefix}.{name}.{kind}", Rearranged(own)

    def _own_rows(self) -> list[range] | None:
        """Return which rows of the stacked parts this rank has; None: all."""
        if self._own is None:
            return None
        starts = accumulate(self.parts.values(), initial=0)
        return [shifted(self._own[name], start) for name, start in zip(self.parts, starts, strict=False)]


def _runs_of(parts: Mapping[str, int], order: Sequence[range]) -> list[tuple[str, list[range]]]:
    """Return the parts that follow one another in an order, each with its rows."""
    starts = accumulate(parts.values(), initial=0)
    places = {name: range(start, start + size) for start, (name, size) in zip(starts, parts.items(), strict=False)}
    blocks = [
        (name, shifted(common, -place.start))
        for wanted in order
        for name, place in places.items()
        if (common := range(max(wanted.start, place.start), min(wanted.stop, place.stop)))
    ]
    return [(name, [rows for _, rows in run]) for name, run in groupby(blocks, key=itemgetter(0))]


def _stacked(runs: Sequence[tuple[str, list[range]]], allocator: WeightAllocator) -> dict[str, int]:
    """Return the rows of the matrices that hold parts in another order; empty: parts in several formats cannot."""
    sizes = [sum(map(len, rows)) for _, rows in runs]
    names = [name for name, _ in runs]
    if len(set(names)) == len(names):
        return dict(zip(names, sizes, strict=True))
    return {names[0]: sum(sizes)} if allocator.has_one_format(names) else {}


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


class SummedLinear(Linear):
    """A linear layer whose columns are divided among devices by input features; their results are added up."""

    def __init__(
        self, allocator: WeightAllocator, name: str, out_features: int, own: range, sums: Sums, *, bias: bool = False
    ) -> None:
        """`own` are this rank's input features."""
        super().__init__(allocator, len(own), {name: out_features}, bias=bias)
        self._inputs, self._sums, self._name = own, sums, name

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return all output features; see `Linear`. Shapes: x [T, own], residual [T, out] -> [T, out].

        Raises: GroupError.
        """
        return self.finished(self._sums.all_reduce(self._name, self.part(x)), residual)

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sums. Shapes: x [T, own] -> [T, out]."""
        return linear(x, self.weight)

    def finished(self, summed: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return all output features from the sums, which are used up. Shapes: [T, out] all."""
        if self.bias is not None:
            summed += self.bias
        return summed if residual is None else summed.add_(residual)

    def _destinations(self) -> Sequence[Destination]:
        (rows,) = super()._destinations()
        return [Rearranged([(rows, [self._inputs])], dim=1)]


def output_linear(
    allocator: WeightAllocator,
    in_features: int,
    name: str,
    out_features: int,
    *,
    bias: bool = False,
    own: range | None = None,
) -> Linear:
    """Return a linear layer that writes to the residual stream, which all ranks have whole.

    `own` are the input features of this rank, where ranks cut the layer before.
    """
    columns, sums = allocator.columns(name, out_features), allocator.sums
    if columns is None:
        return Linear(allocator, in_features, {name: out_features}, bias=bias)
    if sums is None:
        return GatheredLinear(allocator, in_features, name, columns, bias=bias)
    assert own is not None, "ranks on devices cut what comes before"
    return SummedLinear(allocator, name, out_features, own, sums, bias=bias)
