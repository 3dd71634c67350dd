"""A layer's experts as torch tensors that can lie anywhere: each one's gate, up and down matrices in a row of bytes.

So an expert reaches a device in one copy, and is computed with where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertSlabs:
    """The experts of a layer, or a dense network as one."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, storage: Tensor | Sequence[Tensor]
    ) -> None:
        """Take `storage` [E, `slab_bytes`] uint8, whose rows hold an expert each and may be on any device."""
        self.storage = storage
        self._shape = (hidden_size, intermediate_size)
        self._dtype = dtype
        up_values = 2 * intermediate_size * hidden_size
        values = [row.view(dtype) for row in storage]
        self.gate_up = [each[:up_values].view(-1, hidden_size) for each in values]  # [2I, H] each, gate rows first
        self.down = [each[up_values:].view(hidden_size, -1) for each in values]  # [H, I] each

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return len(self.storage)

    def at(self, rows: Sequence[Tensor]) -> ExpertSlabs:
        """Return these experts as they lie, or will lie, in other rows of memory."""
        return ExpertSlabs(*self._shape, self._dtype, rows)

    def parts(self) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        """Return each expert's gate [I, H], up [I, H] and down [H, I]."""
        halves = (gate_up.chunk(2) for gate_up in self.gate_up)
        return [(gate, up, down) for (gate, up), down in zip(halves, self.down, strict=True)]


def slab_bytes(hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> int:
    """Bytes of an expert."""
    return 3 * hidden_size * intermediate_size * dtype.itemsize
