"""The maximum of each row of logits and its place: all that greedy decoding asks of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeflow.kernels.cpu import row_ops


def argmax(x: Any) -> tuple[Any, Any]:
    """Return the maximum of each row, NaN if it has one, and a place where it stands.

    Shapes: x [R, V] -> values [R], indices [R] int64.
    """
    if row_ops.accepts(x):
        return row_ops.argmax(x)
    if isinstance(x, np.ndarray):
        return x.max(axis=-1), x.argmax(axis=-1)
    found = x.max(dim=-1)
    return found.values, found.indices
