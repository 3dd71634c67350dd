"""Planar matrices that a loader fills, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, get_args

import msgspec

from moeflow.kernels.arrays import copy_into
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.planar_weights import GROUP, MadeFormat, PlanarWeights, pack

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import Device

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

    def fill(self, source: Tensor, copy: Callable[[Tensor, Tensor], None] = copy_into) -> None:
        """Round floats to the format and store them. Shapes: source as `shape`, in main memory.

        `copy(target, source)` brings them to the matrix's device.
        """
        values, scales = self.weights.values, self.weights.scales
        step = max(_FILLED_VALUES // source.shape[1], 1)
        for start in range(0, self.num_rows, step):
            rows = source[start : start + step]
            part = values.new_empty(rows.shape, dtype=rows.dtype)
            copy(part, rows)
            packed = pack(part[None], made_format(self.weights.format))
            place = slice(self.first + start, self.first + start + len(part))
            values[self.slot, place] = packed.values[0]
            scales[self.slot, place] = packed.scales[0]


def made_format(name: str) -> MadeFormat:
    """Return a format that floats are rounded to. Raises: ValueError if it is none."""
    return MADE_FORMATS[MADE_FORMATS.index(name)]


def empty_planar(weight_format: MadeFormat, shape: tuple[int, int, int], device: Device) -> PlanarWeights:
    """Return matrices [slots, N, K] to be filled; K divides by `GROUP`."""
    num_matrices, num_rows, num_columns = shape
    assert num_columns % GROUP == 0, "refused before"
    is_int8 = weight_format == "int8"
    values = torch.empty(
        (num_matrices, num_rows, num_columns if is_int8 else num_columns // 8),
        dtype=torch.int8 if is_int8 else torch.int32,
        device=device,
    )
    scales = torch.empty((num_matrices, num_rows, num_columns // GROUP), dtype=torch.float16, device=device)
    return PlanarWeights(weight_format, values, scales)


def split_rows(weights: PlanarWeights, slot: int, sizes: Sequence[int]) -> list[PlanarRows]:
    """Return the parts of a matrix, of so many rows each."""
    parts, first = [], 0
    for size in sizes:
        parts.append(PlanarRows(weights, slot, first, size))
        first += size
    return parts
