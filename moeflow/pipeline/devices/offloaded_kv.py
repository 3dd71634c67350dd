"""Keys and values of a model on a small device: most layers' on the host, some layers' on the device.

To attend on the device over keys and values on the host, a pass first copies a micro-batch's blocks into a *window* on
the device. There are two windows: one fills while the other is in use. Source: MoE-Lightning 4.1 (D4), FlexGen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.core.attention_config import HeadSizes
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kv.storage import KVStorage
from moeflow.pipeline.devices.offload_device import OffloadDevice
from moeflow.pipeline.offloading import NUM_WINDOWS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The sizes of keys and values."""

    num_blocks: int
    block_size: int
    heads: Sequence[HeadSizes]  # of each layer
    dtype: torch.dtype

    def block_bytes(self, layer: int) -> int:
        """Return the bytes of a block of a layer."""
        heads = self.heads[layer]
        return kv_block_bytes(
            self.dtype, num_kv_heads=heads.num_kv_heads, block_size=self.block_size, head_dim=heads.head_dim
        )

    def allocate(self, num_layers: int, device: torch.device | str = "cpu") -> KVStorage:
        """Return zeros for the first layers. Raises: CapacityError."""
        return KVStorage(
            layers=range(num_layers),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.heads[0].num_kv_heads,
            head_dim=self.heads[0].head_dim,
            other_heads=dict(enumerate(self.heads)),
            dtype=self.dtype,
            device=device,
        )

    def window(self, storage: Tensor, num_blocks: int, layer: int) -> KVBlocks:
        """Return the start of a storage [n] uint8 as so many blocks of a layer."""
        heads, used = self.heads[layer], storage[: num_blocks * self.block_bytes(layer)]
        return KVBlocks(
            used, self.dtype, num_kv_heads=heads.num_kv_heads, block_size=self.block_size, head_dim=heads.head_dim
        )


class OffloadedKV:
    """K and V of all layers: those of the first layers on the device, the others in the storage of a pass."""

    def __init__(self, shape: KVShape, device: OffloadDevice, *, num_resident: int, window_blocks: int) -> None:
        """Keep `num_resident` layers on the device; windows have 0 blocks where these are all.

        Raises: CapacityError.
        """
        self.num_resident = num_resident
        self._shape, self._device, self._window_blocks = shape, device, window_blocks
        sizes = [shape.block_bytes(layer) for layer in range(len(shape.heads))]
        device.memory.take(sum(sizes[:num_resident]) * shape.num_blocks, "keys and values that stay")
        self._resident = shape.allocate(num_resident, device.torch_device) if num_resident else None
        self._host: KVStorage | None = None
        num_windows, window_bytes = NUM_WINDOWS if window_blocks else 0, window_blocks * max(sizes)
        purpose = "two micro-batches' keys and values"
        self._windows = [device.allocate(window_bytes, purpose) for _ in range(num_windows)]
        self._staging = [device.allocate_pinned(window_bytes) for _ in self._windows]
        self._num_gathered = 0
        self._gathered: dict[tuple[int, int], int] = {}  # the number of its buffer and window
        self._loaded: dict[tuple[int, int], KVBlocks] = {}

    def begin_pass(self, host: KVStorage) -> None:
        """Take the storage on the host, and clear the windows of a failed pass."""
        self._host = host
        self._gathered.clear()
        self._loaded.clear()

    def is_resident(self, layer: int) -> bool:
        """Whether a layer's keys and values stay on the device."""
        return layer < self.num_resident

    def layer(self, layer: int) -> KVBlocks:
        """Return a layer's blocks on the device or the host."""
        storage = self._resident if self.is_resident(layer) else self._host
        assert storage is not None
        return storage.layer(layer)

    def gather(self, layer: int, micro_batch: int, blocks: Tensor) -> int:
        """Copy blocks of a layer into the next page-locked buffer, one after another; return the bytes copied.

        Shapes: blocks [n] int64. A buffer, and the window that goes with it, are reused after two calls. Rows are words
        of 8 bytes: torch starts all threads anew for each row of more than 32,768 numbers.
        """
        number, self._num_gathered = self._num_gathered % NUM_WINDOWS, self._num_gathered + 1
        block_bytes = self._shape.block_bytes(layer)
        num_bytes = len(blocks) * block_bytes
        staged, rows = (it.view(torch.int64) for it in (self._staging[number][:num_bytes], self.layer(layer).storage))
        width = block_bytes // rows.itemsize
        torch.index_select(rows.view(-1, width), 0, blocks, out=staged.view(-1, width))
        self._gathered[layer, micro_batch] = number
        return num_bytes

    def load(self, layer: int, micro_batch: int, num_blocks: int) -> int:
        """Copy so many gathered blocks to their window; return the bytes copied."""
        number, num_bytes = self._gathered.pop((layer, micro_batch)), num_blocks * self._shape.block_bytes(layer)
        window = self._windows[number]
        self._device.upload(window[:num_bytes], self._staging[number][:num_bytes])
        self._loaded[layer, micro_batch] = self._shape.window(window, self._window_blocks, layer)
        return num_bytes

    def window(self, layer: int, micro_batch: int) -> KVBlocks:
        """Return the window with a micro-batch's blocks. Raises: RuntimeError if they were not loaded."""
        if (layer, micro_batch) not in self._loaded:
            raise RuntimeError(f"the pipeline attends for micro-batch {micro_batch} of layer {layer} without its KV")
        return self._loaded.pop((layer, micro_batch))

    def empty_window(self, layer: int) -> KVBlocks:
        """Return the window of a pass that loads no blocks: its micro-batches use it one after another."""
        return self._shape.window(self._windows[0], self._window_blocks, layer)


def window_numbers(
    starts: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int
) -> tuple[list[int], list[list[int]]]:
    """Return the filled blocks of some sequences, and every block's number in a window.

    A window first has the copied blocks, in order, then empty ones. Of sequence i, starts[i] positions are filled, and
    block_ids[i] are its blocks. No two sequences share a block.
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
