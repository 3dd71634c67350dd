"""The memory that keys and values of past tokens live in: fixed blocks, allocated once.

Which request holds which block is not known here; a block number is all this shares with that bookkeeping.
"""

from __future__ import annotations

import torch

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes
from moeflow.kernels.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.lazy_memory import allocate_lazily


class KVStorage:
    """K and V of all layers, in blocks of `block_size` tokens."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate zeroed storage; in main memory, what is not written yet takes no room.

        `dtype` is float32, bfloat16, or int8: that is with a scale for each token and head.

        Raises: CapacityError if the device lacks the memory.
        """
        shape = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
        layer_bytes = num_blocks * kv_block_bytes(dtype, **shape)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = num_layers * layer_bytes
        try:
            if torch.device(device).type == "cpu":
                storage = allocate_lazily(self.num_bytes)
            else:
                storage = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"The KV cache needs {format_bytes(self.num_bytes)} on {device}, which cannot be allocated; "
                "make the KV cache smaller"
            ) from error
        self.layers = tuple(KVBlocks(layer, dtype, **shape) for layer in storage.view(num_layers, -1))
        self.is_for_kernels = all(layer.handle is not None for layer in self.layers)  # of the CPU extension

    def layer(self, layer_idx: int) -> KVBlocks:
        """Return one layer's blocks."""
        return self.layers[layer_idx]
