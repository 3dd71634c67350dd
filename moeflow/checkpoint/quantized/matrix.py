"""The description of a matrix stored as several tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from moeflow.kernels.weight_format import BlockKind

if TYPE_CHECKING:
    from torch import Tensor


class QuantizedMatrix(Protocol):
    """A matrix of [rows, cols] weights."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        ...

    @property
    def file(self) -> Path:
        """Where its values are."""
        ...

    @property
    def kind(self) -> BlockKind | None:
        """The blocks that its rows become; None: none hold them, so they are widened when they are read."""
        ...

    @property
    def described(self) -> str:
        """Its stored type, if it does not become blocks."""
        ...

    def read_blocks(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as such blocks, [n, bytes of a row] uint8. Raises: CheckpointError."""
        ...

    def read_values(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) as [n, cols] float32. Raises: CheckpointError."""
        ...


class Found(NamedTuple):
    """What a quantization made of a folder's tensors."""

    matrices: dict[str, QuantizedMatrix]  # by the names that the model knows
    used: set[str]  # tensors that are parts of these, or of no use here
