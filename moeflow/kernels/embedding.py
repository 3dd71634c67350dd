"""The rows of a matrix that tokens stand for."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moeflow.kernels.cpu.packed_weights import PackedWeight, unpack_rows


def embedding(token_ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Return each token's row. Shapes: token_ids [T] int64, weight [V, H] -> [T, H], float32 from a packed weight.

    Raises: IndexError if a token has no row.
    """
    if isinstance(weight, PackedWeight):
        return unpack_rows(weight, token_ids)
    return F.embedding(token_ids, weight)
