"""The memory of a model's weights, allocated while the model is built: empty, or filled from packed weights.

A model that is built in the same way asks for the same blocks in the same order, so that a file needs no names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.packed.file_io import whole_pages
from moeflow.checkpoint.packed.large_pages import LargePages
from moeflow.kernels.arrays import Array, address, is_numpy
from moeflow.kernels.lazy_memory import ALIGNMENT, allocate_lazily


class WeightMemory(Protocol):
    """The allocator of a model's packed weights and its other tensors."""

    @property
    def pages(self) -> LargePages | None:
        """What puts mapped weights on large pages; None: they are not mapped."""
        ...

    @property
    def is_filled(self) -> bool:
        """Whether the weights are in it."""
        ...

    @property
    def is_numpy(self) -> bool:
        """Whether it returns NumPy's arrays, not torch's tensors."""
        ...

    def block(self, num_bytes: int) -> Array:
        """Return the memory of a weight: [num_bytes] uint8, aligned as kernels want it. Raises: MemoryError."""
        ...

    def experts(self, num_experts: int, expert_bytes: int) -> Array | None:
        """Return that of a layer's experts, a row for each: [E, expert_bytes or more] uint8; None: kept elsewhere."""
        ...


class FreshMemory:
    """Zeros, to be filled by a loader."""

    pages = None
    is_filled = False
    is_numpy = False

    def block(self, num_bytes: int) -> Array:
        """See `WeightMemory.block`."""
        return allocate_lazily(num_bytes)

    def experts(self, num_experts: int, expert_bytes: int) -> Array | None:
        """See `WeightMemory.experts`."""
        return allocate_lazily(num_experts * expert_bytes).view(num_experts, expert_bytes)


class NotedMemory:
    """Notes which blocks are asked for, and touches none of them; experts are kept elsewhere."""

    pages = None
    is_filled = False
    is_numpy = True

    def __init__(self) -> None:
        self.blocks: list[NDArray[np.uint8]] = []

    @property
    def num_bytes(self) -> int:
        """What `LaidOutMemory` needs for the same blocks."""
        return sum(whole_pages(block.nbytes) for block in self.blocks)

    def block(self, num_bytes: int) -> Array:
        """See `WeightMemory.block`."""
        buffer = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -address(buffer) % ALIGNMENT
        self.blocks.append(buffer[start : start + num_bytes])
        return cast("Array", self.blocks[-1])

    def experts(self, num_experts: int, expert_bytes: int) -> Array | None:
        """See `WeightMemory.experts`."""
        return None


class LaidOutMemory:
    """Memory laid out as in packed weights: each block from the start of a page, a layer's experts slab by slab."""

    def __init__(
        self,
        resident: Any,
        slabs: Sequence[Any] | None = None,
        *,
        is_filled: bool,
        pages: LargePages | None = None,
    ) -> None:
        """Take resident [bytes] uint8 for the blocks, slabs [E, stride] uint8 of each layer with experts.

        `slabs` None: experts are kept elsewhere.
        """
        self.pages = pages
        self.is_filled = is_filled
        self._resident = resident
        self._slabs = slabs
        self.is_numpy = is_numpy(resident)
        self._position = 0
        self._layer = 0

    def block(self, num_bytes: int) -> Array:
        """See `WeightMemory.block`. Raises: ValueError if more is asked for than there is."""
        start = self._position
        self._position += whole_pages(num_bytes)
        if self._position > self._resident.nbytes:
            raise ValueError(f"a model asks for more than the {self._resident.nbytes} bytes that are laid out for it")
        block: Array = self._resident[start : start + num_bytes]
        return block

    def experts(self, num_experts: int, expert_bytes: int) -> Array | None:
        """See `WeightMemory.experts`. Raises: ValueError if they do not match the file."""
        if self._slabs is None:
            return None
        rows: Any = self._slabs[self._layer] if self._layer < len(self._slabs) else None
        if rows is None or num_experts != rows.shape[0] or expert_bytes > rows.shape[1]:
            raise ValueError(f"{num_experts} experts of {expert_bytes} bytes are not layer {self._layer} of the slabs")
        self._layer += 1
        return cast("Array", rows)
