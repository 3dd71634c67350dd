"""Positions that are added to token embeddings: a table that was learned, or sines and cosines."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moeflow.core.embedding_config import AddedPositions
from moeflow.kernels.arrays import Array, array_on, is_numpy, on_host
from moeflow.models.layers.weight_allocator import WeightAllocator


class PositionTable:
    """The vector added for each position of a sequence."""

    def __init__(self, positions: AddedPositions, hidden_size: int, allocator: WeightAllocator) -> None:
        self._positions = positions
        self._hidden_size = hidden_size
        is_learned = positions.kind == "learned"
        self.weight = allocator.empty(positions.first_row + positions.count, hidden_size) if is_learned else None

    def add(self, hidden: Array, positions: Array) -> Array:
        """Return token embeddings with their positions. Shapes: hidden [T, H], positions [T] int64 -> [T, H]."""
        rows = positions + self._positions.first_row
        if self.weight is not None:
            return hidden + self.weight[rows]
        table = sinusoids(on_host(rows), self._hidden_size)
        added = array_on(table, None if is_numpy(hidden) else hidden.device)
        return hidden + (added if is_numpy(hidden) else added.to(hidden.dtype))


def sinusoids(rows: NDArray[np.int64], size: int) -> NDArray[np.float32]:
    """Return the sines, then the cosines, of positions at frequencies from 1 down to 1/10000; an odd last one is 0.

    As tensor2tensor has them, and fairseq after it, rather than 1706.03762. Angles are rounded as models learnt them.

    Shapes: [T] -> [T, size].
    """
    half = size // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / max(half - 1, 1)))
    angles = (rows.astype(np.float32)[:, None] * frequencies.astype(np.float32)).astype(np.float64)
    table = np.zeros((len(rows), size), np.float32)
    table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    return table
