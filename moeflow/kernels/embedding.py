"""The rows of a matrix that tokens stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.packed_weight import PackedWeight, unpack_rows
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def embedding(token_ids: Array, weight: Tensor | PackedWeight) -> Array:
    """Return each token's row. Shapes: token_ids [T] int64, weight [V, H] -> [T, H], float32 from a packed weight.

    Raises: IndexError if a token has no row.
    """
    if isinstance(weight, PackedWeight):
        return unpack_rows(weight, token_ids)
    return torch.nn.functional.embedding(token_ids, weight)
