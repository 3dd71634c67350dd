"""Places of a checkpoint's tensor that lies in several parts, or in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from moeflow.kernels.arrays import copy_into
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_rows import PlanarRows

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

    def fill(self, source: Tensor, copy: Callable[[Tensor, Tensor], None] = copy_into) -> None:
        """Take over the numbers. Shapes: source as `shape`, in main memory.

        `copy(target, source)` brings them to the device of the places.
        """
        for place, parts in self.places:
            taken = torch.cat([source.narrow(self.dim, part.start, len(part)) for part in parts], dim=self.dim)
            if isinstance(place, PlanarRows):
                place.fill(taken, np.arange(len(taken)), copy=copy)
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
