"""The sequences of a pass in the form that kernels on a GPU read: a few tensors on the device, filled by one copy."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moeflow.kernels.device_arrays import staged

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ROWS = 4  # numbers of a sequence


class DeviceTable(msgspec.Struct, frozen=True):
    """The sequences of a pass, as kernels on a GPU read them."""

    # [4, S] int32, of each sequence: its first token in the pass, and the position of that token. Its number of tokens;
    # 0: padding. The index of its first block number in `block_ids`.
    sequences: Tensor
    block_ids: Tensor  # [n] int32
    tree_masks: Tensor | None  # [T] int64, as in `AttentionMetadata`; None: plainly causal
    max_tokens: int  # of a sequence in this pass, at most: bounds the grid
    block_size: int

    @classmethod
    def of(
        cls,
        table: array[int],
        *,
        num_sequences: int,
        max_tokens: int,
        block_size: int,
        tree_masks: Tensor | None,
        device: torch.device,
    ) -> DeviceTable:
        """Copy `AttentionMetadata.table` to a device."""
        (copied,) = staged([np.frombuffer(table, np.int32)], device)
        num_sequence_values = _ROWS * num_sequences
        sequences = copied[:num_sequence_values].view(_ROWS, num_sequences)
        return cls(sequences, copied[num_sequence_values:], tree_masks, max_tokens, block_size)

    @property
    def num_sequences(self) -> int:
        """Sequences, padding included."""
        return self.sequences.shape[1]
