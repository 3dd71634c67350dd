"""A checkpoint with other tensor names in its files, or with tensors that are pieces of stored ones.

It knows no family: the caller gives the stored tensor of each piece.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from moeflow.checkpoint.checkpoint import Checkpoint, StoredRows, TensorInfo, TensorTable
from moeflow.checkpoint.file_errors import known_tensor

if TYPE_CHECKING:
    import torch

_KEPT = 2  # turned matrices, which are read whole: threads take pieces of one, and then of the next


class TensorPiece(msgspec.Struct, frozen=True):
    """What a tensor is in the files: a whole one, or so many rows of one, which may be turned.

    Of turned matrices, and of vectors that lie in a row, it may be a part: each `step`-th number from `first` on.
    """

    source: str  # the stored tensor
    shape: tuple[int, ...]  # of the piece
    first_row: int = 0  # of the stored tensor, counted over all its dimensions but the last
    is_turned: bool = False  # the stored rows are this matrix' columns
    first: int = 0
    step: int = 1
    offset: float = 0.0  # that is added to a whole tensor when it is read, in float32

    @property
    def part(self) -> slice:
        """Which of a stored row's numbers are its."""
        return slice(self.first, self.first + (self.shape[0] - 1) * self.step + 1, self.step)


class RenamedCheckpoint:
    """A `Checkpoint` over another."""

    def __init__(
        self, stored: Checkpoint, pieces: Mapping[str, TensorPiece], config: Mapping[str, Any] | None = None
    ) -> None:
        """Take what each name stands for, within the stored tensors' shapes; `stored` is closed with this."""
        self._stored = stored
        self._pieces = pieces
        self.path: Path = stored.path
        self.config_file: Path = stored.config_file
        self.config: Mapping[str, Any] = stored.config if config is None else config
        self.generation_config: Mapping[str, Any] = stored.generation_config
        self.dtype: str = stored.dtype
        self.tensors = TensorTable({name: self._described(piece) for name, piece in pieces.items()})
        self._turned: dict[tuple[str, int], torch.Tensor] = {}
        self._turning = threading.Lock()

    def _described(self, piece: TensorPiece) -> TensorInfo:
        info = self._stored.tensors[piece.source]
        num_bytes = info.num_bytes * prod(piece.shape) // max(prod(info.shape), 1)
        return TensorInfo(piece.shape, num_bytes, info.stored_as, info.file)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; raises as `Checkpoint.read` does."""
        piece = known_tensor(self._pieces, name, self.path)
        if piece.is_turned:
            return self._turn(piece)
        if piece.shape == self._stored.tensors[piece.source].shape:
            found = self._stored.read(piece.source)
            return found.float() + piece.offset if piece.offset else found
        if len(piece.shape) == 1:  # of a stack of vectors: a row
            return self._rows(piece, 0, 1).flatten()[piece.part]
        return self._rows(piece, 0, piece.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix; raises as `Checkpoint.read` does."""
        piece = known_tensor(self._pieces, name, self.path)
        if not piece.is_turned and piece.shape == self._stored.tensors[piece.source].shape:
            return self._stored.read_rows(piece.source, start, stop)
        rows = self._turn(piece)[start:stop] if piece.is_turned else self._rows(piece, start, stop)
        return StoredRows(rows, np.arange(start, stop))

    def _rows(self, piece: TensorPiece, start: int, stop: int) -> torch.Tensor:
        return self._stored.read_rows(piece.source, piece.first_row + start, piece.first_row + stop).values

    def _turn(self, piece: TensorPiece) -> torch.Tensor:
        """Return a turned matrix, rows behind each other; the last ones are kept, with others' parts of them."""
        with self._turning:
            found = self._turned.get((piece.source, piece.first_row))
            if found is None:
                found = self._rows(piece, 0, piece.shape[1]).t().contiguous()
                while len(self._turned) >= _KEPT:
                    del self._turned[next(iter(self._turned))]
                self._turned[piece.source, piece.first_row] = found
            return found[piece.part]

    def close(self) -> None:
        """Release the files."""
        self._turned.clear()
        self._stored.close()
