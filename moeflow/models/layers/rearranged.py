"""Places of a checkpoint's tensor that lies in several parts, or in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import copy_into
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_blocks import row_bytes
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.kernels.weight_format import BlockKind

if TYPE_CHECKING:
    from torch import Tensor


class Rearranged(msgspec.Struct, frozen=True):
    """Each place, a tensor or `PlanarRows`, takes some rows of the tensor one after another, or some columns."""

    places: Sequence[tuple[Any, Sequence[range]]]
    dim: int = 0  # 0: rows, 1: columns

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        (first, _), *_ = self.places
        size = max(part.stop for _, parts in self.places for part in parts)
        return (size, *first.shape[1:]) if self.dim == 0 else (first.shape[0], size)

    def keeps(self, kind: str) -> bool:
        """Return whether blocks of a kind can fill all places; other values come as floats."""
        return all(isinstance(place, PlanarRows) and place.keeps(kind) for place, _ in self.places)

    def fill(
        self,
        source: Tensor,
        rows: NDArray[np.int64],
        kind: BlockKind | None = None,
        copy: Callable[[Tensor, Tensor], None] = copy_into,
    ) -> None:
        """Take over the whole tensor, whose rows `rows` numbers. Shapes and `copy` as for `PlanarRows.fill`."""
        if not (np.diff(rows) == 1).all():
            source = source[torch.from_numpy(rows.argsort())]

        def size(count: int) -> int:
            return count if kind is None or self.dim == 0 else row_bytes(kind, count)

        for place, parts in self.places:
            pieces = [source.narrow(self.dim, size(part.start), size(len(part))) for part in parts]
            taken = torch.cat(pieces, dim=self.dim)
            if isinstance(place, PlanarRows):
                place.fill(taken, np.arange(len(taken)), kind, copy)
            else:
                copy(place, taken)


def cut(places: Sequence[Tensor | PlanarRows], dim: int) -> Rearranged:
    """Return the places of a tensor that is cut into parts, one for each."""
    start, found = 0, []
    for place in places:
        stop = start + place.shape[dim]
        found.append((place, [range(start, stop)]))
        start = stop
    return Rearranged(found, dim)
