"""The memory that keys and values of past tokens live in: fixed blocks, allocated once.

Which request holds which block is not known here; a block number is all this shares with that bookkeeping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.core.errors import CapacityError
from moeflow.core.units import format_bytes


class KVStorage:
    """K and V of all layers, in blocks of `block_size` tokens.

    A token's K and V lie side by side, so that one gather over blocks brings both.
    """

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
        """Allocate zeroed storage (masked positions are multiplied by zero, so they must be finite).

        Raises: CapacityError if the device lacks the memory.
        """
        shape = (num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim)
        try:
            storage = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            need = format_bytes(torch.Size(shape).numel() * dtype.itemsize)
            raise CapacityError(
                f"The KV cache needs {need} on {device}, which cannot be allocated; make the KV cache smaller"
            ) from error
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = storage.nbytes
        self._layers = storage.unbind(0)

    def layer(self, layer_idx: int) -> Tensor:
        """Return one layer's blocks: [B, block_size, 2, KV, D], K at index 0 and V at 1."""
        return self._layers[layer_idx]
