"""What a pass computes, as numbers, and as the tensors that a model takes.

The numbers are all that has to be known of a batch: also in other processes that compute the same pass.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import msgspec
import torch
from torch import Tensor

from moeflow.core.batch import Batch
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext

PROMPT_CHUNK: Final = 64  # rows of prompt log-probabilities at a time: bounds the copy of [P, V]


class PassInput(msgspec.Struct, frozen=True):
    """The tokens of a pass, sequence by sequence, and where their keys and values go."""

    token_ids: list[int]  # of all sequences, one after another
    starts: list[int]  # of each: how many tokens came before
    num_tokens: list[int]  # of each in this pass
    block_ids: list[tuple[int, ...]]  # of each: its KV blocks
    logit_rows: list[list[int]]  # of tokens whose logits are computed at once: those sampled from, pieces of prompts

    @classmethod
    def of(cls, batch: Batch) -> PassInput:
        """Return what a batch computes."""
        return cls(
            token_ids=[t for entry in batch.entries for t in entry.request.token_ids(entry.start, entry.stop)],
            starts=[entry.start for entry in batch.entries],
            num_tokens=[entry.num_tokens for entry in batch.entries],
            block_ids=[entry.block_ids for entry in batch.entries],
            logit_rows=_logit_rows(batch),
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


def rows_of(hidden: Tensor, rows: list[int]) -> Tensor:
    """Return some tokens' hidden states, in ascending order. Shapes: hidden [T, H] -> [n, H]."""
    return hidden if len(rows) == hidden.shape[0] else hidden[torch.tensor(rows, device=hidden.device)]


def _logit_rows(batch: Batch) -> list[list[int]]:
    """Return the rows that are sampled from, if there are some, then each scored prompt's in pieces."""
    ends = list(accumulate(entry.num_tokens for entry in batch.entries))
    sampled = [end - 1 for end, entry in zip(ends, batch.entries, strict=True) if entry.samples]
    found = [sampled] if sampled else []
    for end, entry in zip(ends, batch.entries, strict=True):
        scored = range(end - entry.num_tokens, end - entry.num_tokens + entry.num_scored)
        found += [list(scored[at : at + PROMPT_CHUNK]) for at in range(0, len(scored), PROMPT_CHUNK)]
    return found
