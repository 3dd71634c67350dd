"""Keys and values of a model whose device is small: most layers' on the host, some layers' on the device.

Where attention runs on the device over what lies on the host, a micro-batch's blocks are copied into a *window* on the
device first. There are two: one is attended over while the next one fills. Source: MoE-Lightning 4.1 (D4), FlexGen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kv.storage import KVStorage
from moeflow.pipeline.devices.offload_device import OffloadDevice
from moeflow.pipeline.offloading import NUM_WINDOWS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What keys and values are, and how many."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer."""
        return kv_block_bytes(
            self.dtype, num_kv_heads=self.num_kv_heads, block_size=self.block_size, head_dim=self.head_dim
        )

    def allocate(self, num_layers: int, num_blocks: int, device: torch.device | str = "cpu") -> KVStorage:
        """Return zeros. Raises: CapacityError."""
        return KVStorage(
            layers=range(num_layers),
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=device,
        )


class OffloadedKV:
    """K and V of all layers: of the first ones on the device, of the others in whatever storage a pass brings."""

    def __init__(self, shape: KVShape, device: OffloadDevice, *, num_resident: int, window_blocks: int) -> None:
        """Keep `num_resident` layers on the device; windows of 0 blocks are for who attends on the host.

        Raises: CapacityError.
        """
        self.num_resident = num_resident
        self._device = device
        device.memory.take(num_resident * shape.num_blocks * shape.block_bytes, "keys and values that stay")
        device.memory.take(NUM_WINDOWS * window_blocks * shape.block_bytes, "two micro-batches' keys and values")
        place, num_windows = device.torch_device, NUM_WINDOWS if window_blocks else 0
        self._resident = shape.allocate(num_resident, shape.num_blocks, place) if num_resident else None
        self._host: KVStorage | None = None
        self._windows = [shape.allocate(1, window_blocks, place).layer(0) for _ in range(num_windows)]
        self._staging = [device.allocate_pinned(window.storage.numel()) for window in self._windows]
        self._block_bytes = shape.block_bytes
        self._num_loads = 0
        self._loaded: dict[tuple[int, int], KVBlocks] = {}

    def begin_pass(self, host: KVStorage) -> None:
        """Take the storage on the host. What was loaded into windows by a pass that failed is forgotten."""
        self._host = host
        self._loaded.clear()

    def is_resident(self, layer: int) -> bool:
        """Return whether a layer's keys and values stay on the device."""
        return layer < self.num_resident

    @property
    def has_windows(self) -> bool:
        """Whether the device attends over what lies on the host."""
        return bool(self._windows)

    def layer(self, layer: int) -> KVBlocks:
        """Return a layer's blocks, where they stay."""
        storage = self._resident if self.is_resident(layer) else self._host
        assert storage is not None
        return storage.layer(layer)

    def load(self, layer: int, micro_batch: int, blocks: Tensor) -> int:
        """Copy blocks of a layer into the next window, one after another; return the bytes copied.

        Shapes: blocks [n] int64. Blocks: until they are there. A window is used again after two loads.
        """
        number, self._num_loads = self._num_loads % NUM_WINDOWS, self._num_loads + 1
        window, num_bytes = self._windows[number], len(blocks) * self._block_bytes
        staged = self._staging[number][:num_bytes].view(len(blocks), self._block_bytes)
        torch.index_select(self.layer(layer).storage.view(-1, self._block_bytes), 0, blocks, out=staged)
        self._device.upload(window.storage[:num_bytes], staged.view(-1))
        self._loaded[layer, micro_batch] = window
        return num_bytes

    def window(self, layer: int, micro_batch: int) -> KVBlocks:
        """Return the window that has a micro-batch's blocks. Raises: RuntimeError if they were not loaded."""
        if (layer, micro_batch) not in self._loaded:
            raise RuntimeError(f"the pipeline attends for micro-batch {micro_batch} of layer {layer} without its KV")
        return self._loaded.pop((layer, micro_batch))


def window_numbers(
    starts: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int
) -> tuple[list[int], list[list[int]]]:
    """Return which blocks of some sequences hold something yet, and every block's number in a window.

    In a window lie first those that are copied, in order, then room for the others. starts[i] positions of sequence i
    are filled; block_ids[i] are its blocks, none of which is another's.
    """
    filled = [blocks[: -(-start // block_size)] for start, blocks in zip(starts, block_ids, strict=True)]
    copied = [block for blocks in filled for block in blocks]
    next_filled, next_empty = 0, len(copied)
    numbers = []
    for with_content, blocks in zip(filled, block_ids, strict=True):
        num_empty = len(blocks) - len(with_content)
        numbers.append(
            [
                *range(next_filled, next_filled + len(with_content)),
                *range(next_empty, next_empty + num_empty),
            ]
        )
        next_filled += len(with_content)
        next_empty += num_empty
    return copied, numbers
