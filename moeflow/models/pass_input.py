"""What a pass computes, as numbers, and as the tensors that a model takes.

The numbers are all that has to be known of a batch: also in other processes that compute the same pass.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.kernels.attention_metadata import AttentionMetadata
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext


class PassInput(msgspec.Struct, frozen=True):
    """The tokens of a pass, sequence by sequence, and where their keys and values go."""

    token_ids: list[int]  # of all sequences, one after another
    starts: list[int]  # of each: how many tokens came before
    num_tokens: list[int]  # of each in this pass
    block_ids: list[tuple[int, ...]]  # of each: its KV blocks

    @classmethod
    def of(cls, batch: Batch) -> PassInput:
        """Return what a batch computes."""
        return cls(
            token_ids=[t for entry in batch.entries for t in entry.request.token_ids(entry.start, entry.stop)],
            starts=[entry.start for entry in batch.entries],
            num_tokens=[entry.num_tokens for entry in batch.entries],
            block_ids=[entry.block_ids for entry in batch.entries],
        )

    def tensors(self, kv: KVStorage, device: torch.device) -> tuple[Tensor, ForwardContext]:
        """Return what a model is called with: token ids [T] int64, and what goes to every layer."""
        metadata = AttentionMetadata.build(
            starts=self.starts,
            num_tokens=self.num_tokens,
            block_ids=self.block_ids,
            block_size=kv.block_size,
            device=device,
        )
        spans = zip(self.starts, self.num_tokens, strict=True)
        positions = [position for start, number in spans for position in range(start, start + number)]
        context = ForwardContext(torch.tensor(positions, device=device), metadata, kv)
        return torch.tensor(self.token_ids, device=device), context
