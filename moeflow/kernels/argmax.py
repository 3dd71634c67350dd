"""The largest of each row of logits: all that greedy decoding asks of them."""

from __future__ import annotations

from torch import Tensor

from moeflow.kernels.cpu import row_ops


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row, NaN if it has one, and a place where it stands.

    Shapes: x [R, V] -> values [R], indices [R] int64.
    """
    if row_ops.accepts(x):
        return row_ops.largest(x)
    found = x.max(dim=-1)
    return found.values, found.indices
