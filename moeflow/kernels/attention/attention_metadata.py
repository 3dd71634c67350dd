"""Attention's description of a pass: the tokens of each sequence, and the places of their K and V.

Built once per pass; index tensors and masks are made when a layer first asks and serve all layers. Knows block
numbers and positions, not who owns the blocks.

A *tree mask* lets tokens of one sequence be alternatives to each other: bit i of a token's mask makes position stop -
64 + i visible; stop is one past the sequence's last position in this pass. It sees all positions
before those 64, and none beyond itself; so a mask of all ones (-1) is plainly causal. A sliding window keeps the last
visible tokens: neighbours on a branch count as neighbours, wherever they are stored. A token must see
at least one position.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import msgspec

from moeflow.kernels.arrays import Array, ids_on, is_int64
from moeflow.kernels.on_demand import on_demand, torch

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import Device
    from moeflow.kernels.attention.device_table import DeviceTable

with on_demand(__name__):
    from moeflow.kernels.attention import device_table as tables


TREE_POSITIONS = 64  # bits of a tree mask


class DecodeGroup(msgspec.Struct, frozen=True):
    """Sequences of similar context length with one token each in the pass."""

    rows: Tensor  # [R] int64, their tokens
    blocks: Tensor  # [R * blocks per row] int64, rows padded to equal length
    length: int  # positions gathered per row
    mask: Tensor | None  # [R, 1, 1, length], added to the scores; None: every position is seen


class PrefillChunk(msgspec.Struct, frozen=True):
    """Several tokens of one sequence."""

    tokens: slice  # in the pass
    blocks: Tensor  # [n] int64
    length: int  # positions gathered
    mask: Tensor | None  # [tokens, length], added to the scores; None: plainly causal


class AttentionPlan(msgspec.Struct, frozen=True):
    """The attention calls of one layer."""

    chunks: tuple[PrefillChunk, ...]
    groups: tuple[DecodeGroup, ...]

    @property
    def is_one_group(self) -> bool:
        """Whether one decode group is the whole pass, its rows then being all tokens in order."""
        return not self.chunks and len(self.groups) == 1


class SequenceSpan(msgspec.Struct, frozen=True):
    """One sequence's share of the pass."""

    first_token: int  # in the pass
    start: int  # position of that token in its sequence
    num_tokens: int
    block_ids: Sequence[int]

    @property
    def stop(self) -> int:
        """One past the position of its last token."""
        return self.start + self.num_tokens

    def visible_blocks(self, sliding_window: int | None, block_size: int) -> tuple[Sequence[int], int]:
        """Return the blocks that any token of the span sees, and the position of the first one's first slot."""
        oldest = 0 if sliding_window is None else max(0, self.start + 1 - sliding_window)
        first_block = oldest // block_size
        return self.block_ids[first_block : -(-self.stop // block_size)], first_block * block_size


class AttentionMetadata(msgspec.Struct):
    """The sequences of one pass."""

    slots: Array  # [T] int64: block * block_size + offset, where each token's K and V go
    spans: tuple[SequenceSpan, ...]
    block_size: int
    tree_masks: Array | None = None  # [T] int64; None: plainly causal
    lengths: array[int] | None = (
        None  # of each sequence, int32: what all its tokens see, from the first on; None: causal
    )
    _plans: dict[tuple[int | None, torch.dtype], AttentionPlan] = {}
    _table: array[int] | None = None
    _device_table: DeviceTable | None = None

    @classmethod
    def build(
        cls,
        *,
        starts: Sequence[int],
        num_tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: Device,
        tree_masks: Array | None = None,
        is_causal: bool = True,
    ) -> AttentionMetadata:
        """Describe a pass, one item per sequence, in the order of their concatenated tokens.

        starts[i] is the position of sequence i's first token in this pass. num_tokens[i] is its number of tokens (at
        least 1). block_ids[i] are the blocks of its positions [0, starts[i] + num_tokens[i]). tree_masks [T] int64
        holds
        a tree mask for each token (see above), on `device`. If not `is_causal`, tokens see all of their sequence.
        """
        spans: list[SequenceSpan] = []
        slots: list[int] = []
        for start, count, blocks in zip(starts, num_tokens, block_ids, strict=True):
            assert count >= 1, "a sequence of a pass has at least one token"
            assert len(blocks) * block_size >= start + count, "blocks must cover the sequence"
            spans.append(SequenceSpan(len(slots), start, count, blocks))
            slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
        assert tree_masks is None or (tree_masks.shape == (len(slots),) and is_int64(tree_masks))
        lengths = None if is_causal else array("i", [span.stop for span in spans])
        return cls(ids_on(slots, device), tuple(spans), block_size, tree_masks, lengths)

    @classmethod
    def over(
        cls,
        *,
        lengths: Sequence[int],
        num_tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: Device,
    ) -> AttentionMetadata:
        """Describe a pass each of whose tokens sees the first lengths[i] positions of its sequence, which are stored.

        Nothing is stored: there are no slots.
        """
        ends = accumulate(num_tokens)
        spans = [
            SequenceSpan(end - count, 0, count, blocks)
            for end, count, blocks in zip(ends, num_tokens, block_ids, strict=True)
        ]
        return cls(ids_on([], device), tuple(spans), block_size, lengths=array("i", lengths))

    @property
    def table(self) -> array[int]:
        """The pass as one array of int32, for kernels.

        For each sequence: first token in the pass, start, number of tokens, and the index of its first block number in
        the rest of the array. Then all block numbers.
        """
        if self._table is None:
            table = array("i", [span.first_token for span in self.spans])
            table.extend([span.start for span in self.spans])
            table.extend([span.num_tokens for span in self.spans])
            table.extend([0, *accumulate(len(span.block_ids) for span in self.spans[:-1])])
            for span in self.spans:
                table.extend(span.block_ids)
            self._table = table
        return self._table

    @property
    def device_table(self) -> DeviceTable:
        """The pass as kernels on a GPU read it, on the device of `slots`. One copy, made on first use."""
        if self._device_table is None:
            self._device_table = tables.DeviceTable.of(
                self.table,
                num_sequences=len(self.spans),
                max_tokens=max(span.num_tokens for span in self.spans),
                block_size=self.block_size,
                tree_masks=self.tree_masks,
                device=self.slots.device,
            )
        return self._device_table

    def plan(self, sliding_window: int | None, dtype: torch.dtype) -> AttentionPlan:
        """Return the attention calls of a layer with this window and this dtype of q."""
        key = (sliding_window, dtype)
        if key not in self._plans:
            self._plans[key] = self._make_plan(sliding_window, dtype)
        return self._plans[key]

    def _make_plan(self, sliding_window: int | None, dtype: torch.dtype) -> AttentionPlan:
        buckets: dict[int, list[SequenceSpan]] = defaultdict(list)
        chunks = []
        for span in self.spans:
            if span.num_tokens > 1 or self.tree_masks is not None:
                chunks.append(self._make_chunk(span, sliding_window, dtype))
            else:
                num_blocks = len(span.visible_blocks(sliding_window, self.block_size)[0])
                buckets[(num_blocks - 1).bit_length()].append(span)
        groups = [self._make_group(buckets[size], sliding_window, dtype) for size in sorted(buckets)]
        return AttentionPlan(tuple(chunks), tuple(groups))

    def _make_chunk(self, span: SequenceSpan, sliding_window: int | None, dtype: torch.dtype) -> PrefillChunk:
        tokens = slice(span.first_token, span.first_token + span.num_tokens)
        is_plain = self.tree_masks is None
        block_ids, first = span.visible_blocks(sliding_window if is_plain else None, self.block_size)
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=self.slots.device)
        if is_plain and span.start == 0 and (sliding_window is None or span.num_tokens <= sliding_window):
            return PrefillChunk(tokens, blocks, span.stop, None)
        queries = torch.arange(span.start, span.stop, device=self.slots.device).unsqueeze(1)
        keys = torch.arange(first, span.stop, device=self.slots.device).unsqueeze(0)
        seen = keys <= queries
        if self.tree_masks is not None:
            bits = keys - (span.stop - TREE_POSITIONS)
            seen &= (bits < 0) | (self.tree_masks[tokens].unsqueeze(1) >> bits.clamp(min=0) & 1).bool()
        if sliding_window is not None:
            seen &= seen.flip(1).cumsum(1).flip(1) <= sliding_window
        return PrefillChunk(tokens, blocks, span.stop - first, _additive(seen, dtype))

    def _make_group(self, spans: list[SequenceSpan], sliding_window: int | None, dtype: torch.dtype) -> DecodeGroup:
        device = self.slots.device
        visible = [span.visible_blocks(sliding_window, self.block_size) for span in spans]
        longest = max(len(block_ids) for block_ids, _ in visible)
        blocks = [[*block_ids, *[block_ids[0]] * (longest - len(block_ids))] for block_ids, _ in visible]
        stops = [span.stop - first for span, (_, first) in zip(spans, visible, strict=True)]
        oldest = [0 if sliding_window is None else max(0, stop - sliding_window) for stop in stops]
        length = max(stops)
        mask = None
        if any(oldest) or any(a != b for a, b in pairwise(stops)):
            keys = torch.arange(length, device=device)
            limits = torch.tensor([oldest, stops], device=device).unsqueeze(-1)
            mask = _additive((keys >= limits[0]) & (keys < limits[1]), dtype)[:, None, None]
        rows = [span.first_token for span in spans]
        return DecodeGroup(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(blocks, dtype=torch.int64, device=device).flatten(),
            length,
            mask,
        )


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `seen` and else a number so low that softmax makes it 0.

    Finite on purpose: if a kernel processes keys in parts, minus infinity could give NaN for an entirely masked part.
    """
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min / 2)
