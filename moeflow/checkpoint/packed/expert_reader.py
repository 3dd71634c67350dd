"""Experts, read from packed weights into memory of our own, past the page cache.

A GPU copies experts by itself from memory that is pinned. Pages of a mapped file cannot be pinned as they are: CUDA
writes to them by default, which copies them, and large pages would have to be made first.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import SlabIndex
from moeflow.checkpoint.packed.reader import OnBytes, SlabReader
from moeflow.kernels.arrays import Array
from moeflow.kernels.lazy_memory import allocate_lazily

_READERS: Final = 4  # reads at a time


class ReadExperts:
    """Memory whose experts are those of a file; a loader fills all else."""

    pages = None
    is_filled = True
    is_numpy = False

    def __init__(self, index: SlabIndex, on_bytes: OnBytes) -> None:
        """Begin with the first layer that has experts."""
        self._index, self._on_bytes = index, on_bytes
        self._layer = 0

    def block(self, num_bytes: int) -> Array:
        """See `WeightMemory.block`."""
        return allocate_lazily(num_bytes)

    def experts(self, num_experts: int, expert_bytes: int) -> Array | None:
        """See `WeightMemory.experts`. Raises: StorageError if one cannot be read, or is damaged; CheckpointError."""
        spec, layer = self._index.spec, self._layer
        stride = spec.stride_bytes(layer)
        assert num_experts == spec.num_experts, "the file was chosen for this model"
        memory = allocate_lazily(num_experts * stride + PAGE_BYTES)
        start = -memory.data_ptr() % PAGE_BYTES
        rows = memory[start : start + num_experts * stride].view(num_experts, stride)
        self._read(layer, [row.numpy().data for row in rows])
        self._layer += 1
        self._on_bytes(self._layer * num_experts, spec.num_slabs)
        return rows

    def _read(self, layer: int, rows: list[memoryview]) -> None:
        reader = SlabReader(self._index, rows[0])
        first = self._index.spec.number(layer, 0)

        def read(expert: int) -> None:
            reader.read(first + expert, rows[expert])

        try:
            with ThreadPoolExecutor(_READERS) as threads:
                for _ in threads.map(read, range(len(rows))):
                    pass
        finally:
            reader.close()
