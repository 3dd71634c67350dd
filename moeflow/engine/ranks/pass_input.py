"""What a pass computes, as numbers: what the ranks of an engine have to know of a batch, and no more."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.engine.offload.offloaded_model import OffloadedModel
from moeflow.kernels.attention_metadata import AttentionMetadata
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM


class PassInput(msgspec.Struct, frozen=True):
    """The tokens of a pass, sequence by sequence, and where their keys and values go."""

    token_ids: list[int]  # of all sequences, one after another
    starts: list[int]  # of each: how many tokens came before
    num_tokens: list[int]  # of each in this pass
    block_ids: list[list[int]]  # of each: its KV blocks

    @classmethod
    def of(cls, batch: Batch) -> PassInput:
        """Return what a batch computes."""
        return cls(
            token_ids=[t for entry in batch.entries for t in entry.request.token_ids(entry.start, entry.stop)],
            starts=[entry.start for entry in batch.entries],
            num_tokens=[entry.num_tokens for entry in batch.entries],
            block_ids=[list(entry.block_ids) for entry in batch.entries],
        )

    @torch.inference_mode()
    def forward(self, model: CausalLM | OffloadedModel, kv: KVStorage, block_size: int, device: torch.device) -> Tensor:
        """Return the final hidden states [T, H] of all tokens; writes their keys and values."""
        metadata = AttentionMetadata.build(
            starts=self.starts,
            num_tokens=self.num_tokens,
            block_ids=self.block_ids,
            block_size=block_size,
            device=device,
        )
        spans = zip(self.starts, self.num_tokens, strict=True)
        positions = [position for start, number in spans for position in range(start, start + number)]
        context = ForwardContext(torch.tensor(positions, device=device), metadata, kv)
        hidden_states: Tensor = model(torch.tensor(self.token_ids, device=device), context)
        return hidden_states
