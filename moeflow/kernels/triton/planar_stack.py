"""Matrices on a GPU, one below the other, each in its own format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from moeflow.kernels.arrays import split
from moeflow.kernels.triton.planar_rows import PlanarRows, split_rows
from moeflow.kernels.triton.planar_weights import PlanarWeights

if TYPE_CHECKING:
    from torch import Tensor


class PlanarStack(msgspec.Struct, frozen=True):
    """Parts of one matrix, whose formats differ: planar, or floats."""

    parts: Sequence[Tensor | PlanarWeights]  # planar weights of one matrix each

    def split(self, sizes: Sequence[int]) -> list[Tensor | PlanarRows]:
        """Return so many rows each, one below the other; none of them is of two parts."""
        left = list(sizes)
        found: list[Tensor | PlanarRows] = []
        for part in self.parts:
            num_rows = part.shape[-2]
            own: list[int] = []
            while sum(own) < num_rows:
                own.append(left.pop(0))
            found += matrix_rows(part if isinstance(part, PlanarWeights) else part.unsqueeze(0), 0, own)
        return found


def matrix_rows(
    matrices: Tensor | PlanarWeights, slot: int, sizes: Sequence[int]
) -> Sequence[Tensor] | Sequence[PlanarRows]:
    """Return the parts of a matrix of a stack, of so many rows each, to be filled."""
    return split_rows(matrices, slot, sizes) if isinstance(matrices, PlanarWeights) else split(matrices[slot], sizes)
