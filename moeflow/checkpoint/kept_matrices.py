"""Rows of matrices that can only be read whole: threads take pieces of one, and then of the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from moeflow.checkpoint.checkpoint import StoredRows

if TYPE_CHECKING:
    from torch import Tensor

_KEPT: Final = 2  # matrices


class KeptMatrices:
    """The last matrices that rows were read of."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        """`read` returns a matrix by its name."""
        self._read = read
        self._matrices: dict[str, Tensor] = {}
        self._reading = threading.Lock()

    def rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows [start, stop). Blocks: while another thread reads a matrix. Raises: as `read`."""
        with self._reading:
            found = self._matrices.get(name)
            if found is None:
                found = self._read(name)
                while len(self._matrices) >= _KEPT:
                    del self._matrices[next(iter(self._matrices))]
                self._matrices[name] = found
        return StoredRows(found[start:stop], np.arange(start, stop))

    def clear(self) -> None:
        """Release the memory."""
        self._matrices.clear()
