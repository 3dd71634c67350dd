"""A pass split into micro-batches: sequences with tokens that pass a layer's stages at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from moeflow.kernels import device_arrays
from moeflow.kernels.attention.attention_metadata import AttentionMetadata, SequenceSpan
from moeflow.kernels.rotary import RotaryTable
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.divided_experts import RoutedTokens
from moeflow.models.layers.rotary import RotaryEmbeddings
from moeflow.pipeline.devices.offloaded_kv import window_numbers
from moeflow.scheduler.offline_batching import form_micro_batches

MIN_CHUNK: Final = 16  # tokens of a sequence from which on attention computes more than it reads


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens are in their sequences, and keys and values in their blocks, as one side has it in its memory."""

    rotary: Sequence[RotaryTable]
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class Side:
    """The host or the device: what describes where tokens are."""

    device: torch.device
    rotary: RotaryEmbeddings
    dtype: torch.dtype  # of rotation

    def places(self, positions: Tensor, spans: Sequence[SequenceSpan], block_size: int) -> Places:
        """Return the places of some sequences' tokens. Shapes: positions [T] int64, on this side."""
        return Places(
            self.rotary(positions, self.dtype), self.attention(spans, [span.block_ids for span in spans], block_size)
        )

    def attention(
        self, spans: Sequence[SequenceSpan], blocks: Sequence[Sequence[int]], block_size: int
    ) -> AttentionMetadata:
        """Return metadata of the same sequences with other blocks."""
        return AttentionMetadata.build(
            starts=[span.start for span in spans],
            num_tokens=[span.num_tokens for span in spans],
            block_ids=blocks,
            block_size=block_size,
            device=self.device,
        )


@dataclass(slots=True)
class MicroBatch:
    """Some sequences of a pass, and what their tokens have become at the layer that they are at."""

    number: int  # in the pass
    rows: Tensor  # [T] int64 on the device, its tokens' places in the pass
    token_ids: Tensor  # likewise
    positions: Tensor  # likewise, each token's place in its sequence
    on_host: Places  # over the blocks as the scheduler numbers them
    on_device: Places  # likewise
    in_window: Places  # on the device, over the blocks of a window
    copied_blocks: Tensor  # [n] int64: blocks within a window
    attends_on_device: bool  # also where keys and values are on the host
    tensors: dict[str, Tensor] = field(default_factory=dict)  # "hidden", "attended", ...
    routed: RoutedTokens | None = None  # on the device, in a pass where the host has a share of the experts
    num_hosted_pairs: int = 0  # tokens and experts that the host computes at this layer
    new_kv: dict[int, Tensor] = field(default_factory=dict)  # by layer: projected, to go to the host
    new_kv_on_host: dict[int, Tensor] = field(default_factory=dict)  # likewise: to be stored there

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences."""
        return len(self.token_ids)

    @property
    def num_read(self) -> int:
        """Positions whose keys and values attention reads."""
        return sum(span.stop for span in self.on_host.attention.spans)

    @property
    def num_seen(self) -> int:
        """Positions that queries look at, over all of them."""
        return sum(span.num_tokens * (span.start + span.stop + 1) // 2 for span in self.on_host.attention.spans)


@dataclass(frozen=True, slots=True)
class Cut:
    """The limits of micro-batches."""

    max_tokens: int  # unless one sequence brings more
    max_prompt_tokens: int  # likewise, of prompts
    max_blocks: int  # that a window has for keys and values of the host; 0: none are there
    decodes_on_host: bool  # only prompts attend on the device


def cut_pass(token_ids: Tensor, context: ForwardContext, host: Side, device: Side, cut: Cut) -> list[MicroBatch]:
    """Cut a pass into balanced micro-batches. None has prompts and decoding sequences.

    One copy brings the numbers of all tokens to the device. Shapes: token_ids [T] int64, on the host as the context is.
    """
    micro_batches, block_size = [], context.attention.block_size
    decoding = [span for span in context.attention.spans if is_decoding(span)]
    prompts = [span for span in context.attention.spans if not is_decoding(span)]
    decodes = group(decoding, cut.max_tokens, 0 if cut.decodes_on_host else cut.max_blocks)
    num_on_host = len(decodes) if cut.decodes_on_host else 0
    groups = [*decodes, *group(prompts, cut.max_prompt_tokens, cut.max_blocks)]
    rows = [torch.cat([torch.arange(it.first_token, it.first_token + it.num_tokens) for it in each]) for each in groups]
    order = torch.cat(rows)
    ordered = device_arrays.on_device([order, token_ids[order], context.positions[order]], device.device)
    cuts = zip(*(each.split_with_sizes([len(row) for row in rows]) for each in ordered), strict=True)
    for number, (spans, of_host, (mine, ids, positions)) in enumerate(zip(groups, rows, cuts, strict=True)):
        places = host.places(context.positions[of_host], spans, block_size)
        on_device = places if device is host else device.places(positions, spans, block_size)
        blocks = [span.block_ids for span in spans]
        copied, numbers = window_numbers([span.start for span in spans], blocks, block_size)
        micro_batches.append(
            MicroBatch(
                number=number,
                rows=mine,
                token_ids=ids,
                positions=positions,
                on_host=places,
                on_device=on_device,
                in_window=Places(on_device.rotary, device.attention(spans, numbers, block_size)),
                copied_blocks=torch.tensor(copied, dtype=torch.int64),
                attends_on_device=number >= num_on_host,
            )
        )
    return micro_batches


def loads_kv(micro_batches: Sequence[MicroBatch]) -> bool:
    """Return whether the device attends to keys and values that earlier passes left on the host."""
    return any(len(each.copied_blocks) for each in micro_batches if each.attends_on_device)


def is_decoding(span: SequenceSpan) -> bool:
    """Return whether a sequence adds few tokens to its context, so that its attention mostly reads."""
    return span.start > 0 and span.num_tokens < MIN_CHUNK


def group(spans: Sequence[SequenceSpan], max_tokens: int, max_blocks: int = 0) -> list[list[SequenceSpan]]:
    """Share out sequences: each micro-batch gets about as many tokens as any other, a long sequence one of its own.

    Micro-batches of several sequences have at most `max_blocks` blocks; 0: any number.
    """
    counts = [span.num_tokens for span in spans]
    short = [count for count in counts if count < max_tokens]
    number = len(counts) - len(short) + -(-sum(short) // max_tokens)
    while True:
        groups, waiting = form_micro_batches(
            spans,
            lambda span: span.num_tokens,
            num_micro_batches=number,
            max_requests=len(spans) + 1,
            gen_len=0,
            cache_size=sum(counts),
        )
        assert not waiting
        if not max_blocks or number >= len(spans) or all(_num_blocks(each) <= max_blocks for each in groups):
            return groups
        number += 1


def _num_blocks(spans: Sequence[SequenceSpan]) -> int:
    return sum(len(span.block_ids) for span in spans)
