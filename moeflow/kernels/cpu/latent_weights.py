"""The up-projection from latents to each head's keys and values, as latent attention multiplies by it.

A checkpoint has one matrix of keys and values, head by head. Queries meet that of keys transposed, so it is packed so:
of each head's [N, L] the outputs are the L dimensions of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from moeflow.kernels.arrays import Array, as_tensor, contiguous
from moeflow.kernels.cpu.packed_weight import PackedWeight, matrix_bytes, whole_bands
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import WeightFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class UpProjectionShape(msgspec.Struct, frozen=True):
    """N: `nope_dim`, V: `value_dim`, L: `latent_dim`."""

    num_heads: int
    nope_dim: int
    value_dim: int
    latent_dim: int

    @property
    def rows(self) -> int:
        """Those of the checkpoint's matrix."""
        return self.num_heads * (self.nope_dim + self.value_dim)


class PackedUpProjection:
    """Two packed matrices, each head's rows filled up to whole bands: keys [L, N] and values [V, L] of each head."""

    __slots__ = ("dims", "keys", "values")

    def __init__(
        self, dims: UpProjectionShape, weight_format: WeightFormat, take: Callable[[int], Array], *, is_wide: bool
    ) -> None:
        """`take` returns so many bytes of memory. Formats must hold any values."""
        self.dims = dims
        self.keys, self.values = (
            PackedWeight(take(matrix_bytes(weight_format, rows, cols)), weight_format, rows, cols, is_wide=is_wide)
            for rows, cols in (
                (dims.num_heads * whole_bands(dims.latent_dim), dims.nope_dim),
                (dims.num_heads * whole_bands(dims.value_dim), dims.latent_dim),
            )
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the checkpoint's matrix: [H * (N + V), L]."""
        return self.dims.rows, self.dims.latent_dim

    def fill(self, source: Any) -> None:
        """Pack the checkpoint's matrix, floats."""
        dims = self.dims
        heads = source.reshape(dims.num_heads, dims.nope_dim + dims.value_dim, dims.latent_dim)
        keys, values = heads[:, : dims.nope_dim].swapaxes(1, 2), heads[:, dims.nope_dim :]
        self.keys.fill(contiguous(keys).reshape(-1, dims.nope_dim), _rows(dims.num_heads, dims.latent_dim))
        self.values.fill(contiguous(values).reshape(-1, dims.latent_dim), _rows(dims.num_heads, dims.value_dim))

    def unpack(self) -> Tensor:
        """Return the exact values in a checkpoint's layout: [H, N + V, L] float32."""
        dims = self.dims
        parts = [
            as_tensor(weight.unpack()).view(dims.num_heads, -1, weight.cols)[:, :rows]
            for weight, rows in ((self.keys, dims.latent_dim), (self.values, dims.value_dim))
        ]
        return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1)


def _rows(num_heads: int, rows: int) -> NDArray[np.int64]:
    """Return where heads' rows lie, each head's beginning at a whole band."""
    return (np.arange(num_heads)[:, None] * whole_bands(rows) + np.arange(rows)).reshape(-1)
