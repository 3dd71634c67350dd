"""A pass cut into micro-batches: which sequences' tokens go through a layer's stages together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeflow.kernels.attention_metadata import AttentionMetadata, Span
from moeflow.layers.context import ForwardContext
from moeflow.layers.rotary import RotaryEmbedding, RotaryTable
from moeflow.memory.offloaded_kv import window_numbers
from moeflow.scheduler.offline_batching import form_micro_batches


@dataclass(slots=True)
class MicroBatch:
    """Some sequences of a pass, and what their tokens have become at the layer that they are at."""

    number: int  # in the pass
    rows: Tensor  # [T] int64, its tokens' places in the pass
    token_ids: Tensor  # [T] int64
    rotary: RotaryTable
    attention: AttentionMetadata  # over the blocks as the scheduler numbers them
    copied_blocks: Tensor  # [n] int64: those that a window gets
    window_attention: AttentionMetadata  # over the blocks of a window
    tensors: dict[str, Tensor] = field(default_factory=dict)  # "hidden", "attended", ...
    unsaved_qkv: dict[int, Tensor] = field(default_factory=dict)  # by layer: the host has yet to get K and V of them

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences."""
        return len(self.token_ids)

    @property
    def num_read(self) -> int:
        """Positions whose keys and values attention reads."""
        return sum(span.stop for span in self.attention.spans)

    @property
    def num_seen(self) -> int:
        """Positions that queries look at, over all of them."""
        return sum(span.num_tokens * (span.start + span.stop + 1) // 2 for span in self.attention.spans)


def cut_pass(
    token_ids: Tensor, context: ForwardContext, rotary: RotaryEmbedding, dtype: torch.dtype, *, max_tokens: int
) -> list[MicroBatch]:
    """Cut a pass into balanced micro-batches of at most `max_tokens`, unless one sequence brings more.

    Shapes: token_ids [T] int64.
    """
    micro_batches = []
    for number, spans in enumerate(group(context.attention.spans, max_tokens)):
        rows = torch.cat([torch.arange(span.first_token, span.first_token + span.num_tokens) for span in spans])
        over_all, copied_blocks, over_window = _attention(spans, context.attention.block_size)
        micro_batches.append(
            MicroBatch(
                number=number,
                rows=rows,
                token_ids=token_ids[rows],
                rotary=rotary(context.positions[rows], dtype),
                attention=over_all,
                copied_blocks=copied_blocks,
                window_attention=over_window,
            )
        )
    return micro_batches


def group(spans: Sequence[Span], max_tokens: int) -> list[list[Span]]:
    """Share out sequences: each micro-batch gets about as many tokens as any other."""
    num_tokens = sum(span.num_tokens for span in spans)
    groups, waiting = form_micro_batches(
        spans,
        lambda span: span.num_tokens,
        num_micro_batches=min(-(-num_tokens // max_tokens), len(spans)),
        max_requests=len(spans) + 1,
        gen_len=0,
        cache_size=num_tokens,
    )
    assert not waiting
    return groups


def _attention(spans: Sequence[Span], block_size: int) -> tuple[AttentionMetadata, Tensor, AttentionMetadata]:
    """Return metadata over the scheduler's blocks, the blocks [n] int64 that a window gets, and metadata over that."""
    starts = [span.start for span in spans]
    num_tokens = [span.num_tokens for span in spans]
    block_ids = [span.block_ids for span in spans]
    copied, numbers = window_numbers(starts, block_ids, block_size)
    over_all, over_window = (
        AttentionMetadata.build(
            starts=starts, num_tokens=num_tokens, block_ids=blocks, block_size=block_size, device="cpu"
        )
        for blocks in (block_ids, numbers)
    )
    return over_all, torch.tensor(copied, dtype=torch.int64), over_window
