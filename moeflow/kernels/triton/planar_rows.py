"""Planar matrices that a loader fills, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import copy_into
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton.planar_weights import GROUP, MadeFormat, PlanarWeights, pack, widened
from moeflow.kernels.weight_format import FORMATS, BlockKind, WeightFormat, block_kind

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import Device

with on_demand(__name__):
    from moeflow.kernels.triton import planar_blocks

MADE_FORMATS: Final[tuple[MadeFormat, ...]] = get_args(MadeFormat)
_FILLED_VALUES: Final = 1 << 20  # at a time: bounds the float32 copies, which each thread of a loader makes


class PlanarRows(msgspec.Struct, frozen=True):
    """Neighbouring rows of one matrix."""

    weights: PlanarWeights
    slot: int
    first: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.num_rows, self.weights.shape[2]

    def keeps(self, kind: str) -> bool:
        """Return whether blocks of a kind can fill these rows; other values come as floats."""
        return planar_blocks.keeps(self.weights, kind)

    def fill(
        self,
        source: Tensor,
        rows: NDArray[np.int64],
        kind: BlockKind | None = None,
        copy: Callable[[Tensor, Tensor], None] = copy_into,
    ) -> None:
        """Store `source`, which is in main memory, as the rows that `rows` numbers. Floats are rounded to the format.

        Shapes: source [n, K] floats, or with `kind` [n, bytes of a row] uint8; rows [n]. `copy(target, source)` brings
        them to the matrix's device.
        """
        if not (np.diff(rows) == 1).all():
            order = rows.argsort()
            source, rows = source[torch.from_numpy(order)], rows[order]
        weights = self.weights
        step = len(source) if kind is not None else max(_FILLED_VALUES // source.shape[1], 1)
        for start in range(0, len(source), step):
            given = source[start : start + step].unsqueeze(0)
            part = weights.values.new_empty(given.shape, dtype=given.dtype)
            copy(part, given)
            found = pack(part, made_format(weights.format)) if kind is None else planar_blocks.from_blocks(part, kind)
            self._store(found if found.format == weights.format else widened(found), rows[start : start + step])

    def _store(self, found: PlanarWeights, rows: NDArray[np.int64]) -> None:
        """Copy rows to their places, neighbours at once."""
        begin = 0
        for neighbours in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            end, first = begin + len(neighbours), self.first + int(neighbours[0])
            for plane, new in ((self.weights.values, found.values[0]), (self.weights.scales, found.scales[0])):
                plane[self.slot, first : first + len(neighbours)] = new[begin:end]
            begin = end


def made_format(name: str) -> MadeFormat:
    """Return a format that floats are rounded to. Raises: ValueError if it is none."""
    return MADE_FORMATS[MADE_FORMATS.index(name)]


def empty_planar(weight_format: WeightFormat, shape: tuple[int, int, int], device: Device) -> PlanarWeights:
    """Return matrices [slots, N, K] to be filled, of a format with `planar_bits`; K divides by its blocks."""
    num_matrices, num_rows, num_columns = shape
    row = _row_of(weight_format, num_columns)
    values, scales = (
        torch.empty((num_matrices, num_rows, plane.shape[2]), dtype=plane.dtype, device=device)
        for plane in (row.values, row.scales)
    )
    return PlanarWeights(row.format, values, scales, row.group)


def _row_of(weight_format: WeightFormat, num_columns: int) -> PlanarWeights:
    """Return one row of zeros, as an example of the format."""
    if FORMATS[weight_format].is_made:
        assert num_columns % GROUP == 0, "refused before"
        return pack(torch.zeros(1, 1, num_columns), made_format(weight_format))
    kind = block_kind(weight_format)
    zeros = torch.zeros(1, 1, planar_blocks.row_bytes(kind, num_columns), dtype=torch.uint8)
    return planar_blocks.from_blocks(zeros, kind)


def split_rows(weights: PlanarWeights, slot: int, sizes: Sequence[int]) -> list[PlanarRows]:
    """Return the parts of a matrix, of so many rows each."""
    parts, first = [], 0
    for size in sizes:
        parts.append(PlanarRows(weights, slot, first, size))
        first += size
    return parts
