"""The memory that keys and values of past tokens live in: fixed blocks, whose memory is taken when they are written.

Which request holds which block is not known here; a block number is all this shares with that bookkeeping.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from moeflow.core.attention_config import HeadSizes
from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.core.units import KIB, format_bytes
from moeflow.kernels.arrays import array_on, ids_on
from moeflow.kernels.attention.attention import move_kv
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from moeflow.kernels.arrays import Array, Device, DType
    from moeflow.kv.state_storage import StateStorage


_SMALL_BYTES: Final = 256 * KIB  # of a layer on small pages: the share of a large page that justifies it


class KVStorage:
    """K and V of all layers that attend, or of those of a stage, in blocks of `block_size` tokens; and the states of
    recurrent layers.

    The first blocks lie on small pages: a large page in each layer may exceed all keys and values of a short answer.
    Once a layer's would fill a part of a large page, all lie on such (`will_write`).
    """

    def __init__(  # noqa: PLR0913  # sizes
        self,
        *,
        layers: Sequence[int],
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DType | str,
        device: Device,
        latent_dim: int = 0,
        other_heads: Mapping[int, HeadSizes] = MappingProxyType({}),
        gives_back: bool = False,
    ) -> None:
        """Allocate zeroed storage for layers of these numbers. In main memory, unwritten parts take no pages.

        `dtype` is float32, bfloat16, or int8: that is with a scale for each token and head. `latent_dim` is how many
        dimensions of a key are its value, too; 0: values are stored by themselves, as wide as keys. `other_heads` are
        those of layers that have not `num_kv_heads` of `head_dim`. `device` None: only kernels of the CPU extension
        read it. With `gives_back`, in main memory, blocks are taken and given back a few at a time: pages stay small,
        which costs the kernels some speed.

        Raises: CapacityError if the device lacks the memory.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states: StateStorage | None = None  # of recurrent layers, set where a model has them
        self._device = device
        self._touched = bytearray(num_blocks)  # 1 for blocks that have been written
        self._places = {layer_idx: place for place, layer_idx in enumerate(layers)}

        usual = HeadSizes(num_kv_heads, head_dim)
        shapes = [_shape(other_heads.get(layer_idx, usual), block_size, latent_dim) for layer_idx in layers]
        self._cell_bytes = [kv_block_bytes(dtype, **shape) for shape in shapes]  # of a block in each layer
        sizes = [num_blocks * cell_bytes for cell_bytes in self._cell_bytes]
        *self._starts, self.num_bytes = accumulate(sizes, initial=0)  # of each layer, one behind the other, in bytes

        self._memory, storage = _allocate(self.num_bytes, device)
        self.layers = tuple(
            KVBlocks(storage[start : start + size], dtype, **shape)
            for start, size, shape in zip(self._starts, sizes, shapes, strict=True)
        )
        self.is_for_kernels = all(layer.handle is not None for layer in self.layers)  # of the CPU extension
        self._num_small = num_blocks  # the first ones: as long as others are not written, pages are small
        if self._memory is not None and not gives_back:
            self._num_small = min(num_blocks, _SMALL_BYTES // max(self._cell_bytes, default=1))

    def layer(self, layer_idx: int) -> KVBlocks:
        """Return the blocks of the model's layer of this number."""
        return self.layers[self._places[layer_idx]]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy K and V of tokens in all layers, from slots to slots, block * block_size + offset each, in order."""
        if moves:
            from_slots, to_slots = (ids_on(slots, self._device) for slots in zip(*moves, strict=True))
            for layer in self.layers:
                move_kv(layer, from_slots, to_slots)

    @property
    def block_bytes(self) -> int:
        """Memory that a block takes at most, in whole pages."""
        cells = (divmod(num_bytes, mmap.PAGESIZE) for num_bytes in self._cell_bytes)
        # One of no whole pages begins and ends within some.
        return sum(num_pages + (2 if rest else 0) for num_pages, rest in cells) * mmap.PAGESIZE

    @property
    def num_touched(self) -> int:
        """Blocks whose memory is taken."""
        return self._touched.count(1)

    def untouched(self, blocks: Iterable[int]) -> set[int]:
        """Return those of the blocks whose memory would be taken by writing them."""
        return {block for block in blocks if not self._touched[block]}

    def touch(self, blocks: Iterable[int]) -> None:
        """Note that blocks are about to be written."""
        for block in blocks:
            self._touched[block] = 1

    def take_memory(self, blocks: Iterable[int]) -> None:
        """Have the system allocate pages for unwritten blocks in main memory."""
        for block in blocks:
            for _, stored in self._cells_of(block):
                stored[:: mmap.PAGESIZE] = 0
                stored[-1] = 0  # it begins and ends within pages

    def will_write(self, blocks: Iterable[int]) -> None:
        """Have blocks lie on pages that are worth it: to be called before they are written."""
        if self._num_small == self.num_blocks or max(blocks, default=-1) < self._num_small:
            return
        assert self._memory is not None, "elsewhere nothing is small"
        cells = zip(self._starts, self._cell_bytes, strict=True)
        self._memory.enlarge_pages(range(start, start + self._num_small * num_bytes) for start, num_bytes in cells)
        self._num_small = self.num_blocks

    @property
    def content_bytes(self) -> int:
        """What a block's keys and values are, over all layers."""
        return sum(self._cell_bytes)

    @property
    def is_in_main_memory(self) -> bool:
        """Whether blocks can be copied out and in."""
        return self._memory is not None

    def copy_out(self, block: int, into: memoryview) -> None:
        """Copy a block's `content_bytes`, layer by layer."""
        content = np.frombuffer(into, np.uint8)
        for within, stored in self._cells_of(block):
            content[within] = stored

    def copy_in(self, block: int, content: memoryview) -> None:
        """Write what `copy_out` gave."""
        self.will_write([block])
        read = np.frombuffer(content, np.uint8)
        for within, stored in self._cells_of(block):
            stored[...] = read[within]

    def _cells_of(self, block: int) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        """Yield each layer's part of a block: its place in the copy, and its memory."""
        assert self._memory is not None, "it is on a device"
        first = 0
        for start, num_bytes in zip(self._starts, self._cell_bytes, strict=True):
            place = start + block * num_bytes
            yield slice(first, first + num_bytes), self._memory.bytes[place : place + num_bytes]
            first += num_bytes

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return the memory of blocks to the system, whole pages only; their contents are lost."""
        if self._memory is None:
            return
        runs = _runs(sorted(blocks))
        for start, num_bytes in zip(self._starts, self._cell_bytes, strict=True):
            for first, end in runs:
                self._memory.give_back(start + first * num_bytes, start + end * num_bytes)
        for first, end in runs:
            self._touched[first:end] = bytes(end - first)


def _shape(heads: HeadSizes, block_size: int, latent_dim: int) -> dict[str, int]:
    """Return what `KVBlocks` and `kv_block_bytes` call the sizes of a layer's blocks."""
    return {
        "num_kv_heads": heads.num_kv_heads,
        "block_size": block_size,
        "head_dim": heads.head_dim,
        "latent_dim": latent_dim,
    }


def _allocate(num_bytes: int, device: Device) -> tuple[LazyMemory | None, Array]:
    """Return zeros [num_bytes] uint8, and their mapping if it is main memory. Raises: CapacityError."""
    with out_of_memory_as(
        f"The KV cache needs {format_bytes(num_bytes)} on {device or 'cpu'}, which cannot be allocated; "
        "make the KV cache smaller"
    ):
        if device is None or torch.device(device).type == "cpu":
            memory = LazyMemory(num_bytes, huge_pages=False)
            return memory, array_on(memory.bytes, device)
        return None, torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
