"""The memory that keys and values of past tokens live in: fixed blocks, whose memory is taken when they are written.

Which request holds which block is not known here; a block number is all this shares with that bookkeeping.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.kernels.arrays import array_on, ids_on
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from moeflow.kernels.arrays import Device, DType
    from moeflow.kv.state_storage import StateStorage


class KVStorage:
    """K and V of all layers that attend, or of those of a stage, in blocks of `block_size` tokens; and the states of
    recurrent layers.
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
        gives_back: bool = False,
    ) -> None:
        """Allocate zeroed storage for layers of these numbers; in main memory, what is not written yet takes no room.

        `dtype` is float32, bfloat16, or int8: that is with a scale for each token and head. `latent_dim` is how many
        dimensions of a key are its value, too; 0: values are stored by themselves, as wide as keys. `device` None: only
        kernels of the CPU extension read it. With `gives_back`, in main memory, blocks are taken and given back a few
        at a time: pages are small, which costs the kernels some speed.

        Raises: CapacityError if the device lacks the memory.
        """
        shape = {
            "num_kv_heads": num_kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
            "latent_dim": latent_dim,
        }
        self._cell_bytes = kv_block_bytes(dtype, **shape)  # of a block in one layer
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self.states: StateStorage | None = None  # of recurrent layers, set by whoever has some
        self._places = {layer_idx: place for place, layer_idx in enumerate(layers)}
        self.num_bytes = len(layers) * num_blocks * self._cell_bytes
        self._touched = bytearray(num_blocks)  # 1 for blocks that have been written
        self._memory: LazyMemory | None = None
        try:
            if device is None or torch.device(device).type == "cpu":
                self._memory = LazyMemory(self.num_bytes, huge_pages=not gives_back)
                storage = array_on(self._memory.bytes, device)
            else:
                storage = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"The KV cache needs {format_bytes(self.num_bytes)} on {device or 'cpu'}, which cannot be allocated; "
                "make the KV cache smaller"
            ) from error
        self.layers = tuple(
            KVBlocks(layer, dtype, **shape) for layer in storage.reshape(len(layers), num_blocks * self._cell_bytes)
        )
        self.is_for_kernels = all(layer.handle is not None for layer in self.layers)  # of the CPU extension

    def layer(self, layer_idx: int) -> KVBlocks:
        """Return the blocks of the model's layer of this number."""
        return self.layers[self._places[layer_idx]]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy K and V of tokens in all layers, from slots to slots, block * block_size + offset each, in order."""
        if moves:
            from_slots, to_slots = (ids_on(slots, self._device) for slots in zip(*moves, strict=True))
            for layer in self.layers:
                layer.move(from_slots, to_slots)

    @property
    def block_bytes(self) -> int:
        """Memory that a block takes at most, in whole pages."""
        num_pages, rest = divmod(self._cell_bytes, mmap.PAGESIZE)
        return len(self.layers) * (num_pages + (2 if rest else 0)) * mmap.PAGESIZE  # it begins and ends within pages

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
        """Have the system give blocks in main memory their pages, of which nothing is written yet."""
        for block in blocks:
            self._cells[:, block, :: mmap.PAGESIZE] = 0
            self._cells[:, block, -1] = 0  # they begin and end within pages

    @property
    def content_bytes(self) -> int:
        """What a block's keys and values are, over all layers."""
        return len(self.layers) * self._cell_bytes

    @property
    def is_in_main_memory(self) -> bool:
        """Whether blocks can be copied out and in."""
        return self._memory is not None

    def copy_out(self, block: int, into: memoryview) -> None:
        """Copy a block's `content_bytes`, layer by layer."""
        self._bytes_of(into)[...] = self._cells[:, block]

    def copy_in(self, block: int, content: memoryview) -> None:
        """Write what `copy_out` gave."""
        self._cells[:, block] = self._bytes_of(content)

    @property
    def _cells(self) -> NDArray[np.uint8]:
        """All blocks: [layers, num_blocks, bytes of a block in a layer]."""
        assert self._memory is not None, "it is on a device"
        return self._memory.bytes.reshape(len(self.layers), self.num_blocks, self._cell_bytes)

    def _bytes_of(self, content: memoryview) -> NDArray[np.uint8]:
        return np.frombuffer(content, np.uint8).reshape(len(self.layers), self._cell_bytes)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return the memory of blocks to the system, as far as whole pages belong to them; what is in them is lost."""
        if self._memory is None:
            return
        runs = _runs(sorted(blocks))
        for layer_idx in range(len(self.layers)):
            base = layer_idx * self.num_blocks
            for first, end in runs:
                self._memory.give_back((base + first) * self._cell_bytes, (base + end) * self._cell_bytes)
        for first, end in runs:
            self._touched[first:end] = bytes(end - first)


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
