"""What a pass computes, as numbers, and as the tensors that a model takes.

The numbers are all that has to be known of a batch: also in other processes that compute the same pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from moeflow.core.batch import Batch, BatchEntry, StateUse
from moeflow.core.token_tree import branch_masks, depths
from moeflow.kernels.arrays import Array, ids_on, rows_of
from moeflow.kernels.attention.attention_metadata import TREE_POSITIONS, AttentionMetadata
from moeflow.kernels.recurrent.state_sequences import StateSequence, StateSequences
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext

if TYPE_CHECKING:
    from moeflow.kernels.arrays import Device

T = TypeVar("T")
PROMPT_CHUNK: Final = 64  # rows of prompt log-probabilities at a time: bounds the copy of [P, V]


class PassInput(msgspec.Struct, frozen=True, tag="pass"):
    """The tokens of a pass, sequence by sequence, and where their keys and values go."""

    token_ids: list[int]  # of all sequences, one after another
    starts: list[int]  # of each: how many tokens came before
    num_tokens: list[int]  # of each in this pass
    block_ids: list[tuple[int, ...]]  # of each: its KV blocks
    logit_rows: list[list[int]]  # of tokens whose logits are computed at once: those sampled from, pieces of prompts
    num_micro_batches: int = 1  # that stages compute one after another, and other ranks by turns
    pooled_rows: list[list[int]] = []  # of tokens whose hidden states become vectors, of each such sequence
    trees: list[tuple[int, ...]] = []  # of each: the parents of the nodes of a tree that it ends with; empty: no trees
    num_encoder_tokens: list[int] = []  # of each, in an encoder-decoder: how many of its tokens are its input
    kv_moves: list[tuple[int, int]] = []  # from slot to slot, before anything else: what the pass before kept of trees
    states: list[StateUse] = []  # of each, in a model with recurrent layers; it is one micro-batch

    @classmethod
    def of(cls, batch: Batch, num_micro_batches: int = 1, kv_moves: Sequence[tuple[int, int]] = ()) -> PassInput:
        """Return a batch's computation, and the moves before it. With trees it is one micro-batch."""
        trees = [entry.tree.parents for entry in batch.entries]
        encoder_tokens = [entry.request.num_encoder_tokens for entry in batch.entries]
        return cls(
            token_ids=[t for entry in batch.entries for t in _token_ids(entry)],
            starts=[entry.start for entry in batch.entries],
            num_tokens=[entry.num_rows for entry in batch.entries],
            block_ids=[entry.block_ids for entry in batch.entries],
            logit_rows=_logit_rows(batch),
            pooled_rows=_pooled_rows(batch),
            num_micro_batches=1 if any(trees) else num_micro_batches,
            trees=trees if any(trees) else [],
            num_encoder_tokens=encoder_tokens if any(encoder_tokens) else [],
            kv_moves=list(kv_moves),
            states=[entry.state for entry in batch.entries if entry.state is not None],
        )

    def result_rows(self) -> list[int]:
        """Return all tokens whose hidden states come back, ascending."""
        return sorted({row for rows in self.row_groups() for row in rows})

    def row_groups(self) -> list[list[int]]:
        """Return the tokens with returned hidden states: first the tokens with logits."""
        return self.logit_rows + self.pooled_rows

    def results(self, hidden: Array) -> Iterator[Array]:
        """Return the hidden states of each of `row_groups`, from those of `result_rows`, one after another."""
        places = {row: place for place, row in enumerate(self.result_rows())}
        return (rows_of(hidden, [places[row] for row in rows]) for rows in self.row_groups())

    def micro_batches(self) -> list[PassInput]:
        """Return the pass in pieces of as many tokens, a token more or less, in order; its results are all of theirs.

        A split sequence continues in the next piece, which finds the stored keys and values of the previous one.
        """
        if self.num_micro_batches == 1:
            return [msgspec.structs.replace(self, logit_rows=[self.result_rows()], pooled_rows=[])]
        num_tokens, number = len(self.token_ids), self.num_micro_batches
        bounds = [piece * num_tokens // number for piece in range(number + 1)]
        results = self.result_rows()
        return [self._piece(start, stop, results) for start, stop in pairwise(bounds)]

    def _piece(self, start: int, stop: int, results: list[int]) -> PassInput:
        """Return some tokens of the pass as one; `results` are the rows of all of it."""
        ends = accumulate(self.num_tokens)
        spans = list(zip(ends, self.num_tokens, self.starts, self.block_ids, strict=True))
        cut = [
            (before + max(start - (end - number), 0), min(end, stop) - max(end - number, start), blocks)
            for end, number, before, blocks in spans
            if end > start and end - number < stop
        ]
        starts, num_tokens, block_ids = (list(column) for column in zip(*cut, strict=True))
        rows = [row - start for row in results if start <= row < stop]
        return PassInput(self.token_ids[start:stop], starts, num_tokens, block_ids, [rows])

    def of_sequences(self, places: Sequence[int]) -> PassInput:
        """Return the pass of some of the sequences, in order. Its rows with results are one group."""
        starts = list(accumulate(self.num_tokens, initial=0))
        rows = [row for place in places for row in range(starts[place], starts[place + 1])]
        own_rows, results = {row: at for at, row in enumerate(rows)}, self.result_rows()

        def of(column: list[T]) -> list[T]:
            return [column[place] for place in places] if column else []

        return PassInput(
            [self.token_ids[row] for row in rows],
            of(self.starts),
            of(self.num_tokens),
            of(self.block_ids),
            [[own_rows[row] for row in results if row in own_rows]],
            trees=of(self.trees),
            num_encoder_tokens=of(self.num_encoder_tokens),
        )

    def tensors(self, kv: KVStorage, device: Device) -> tuple[Array, ForwardContext]:
        """Return what a model is called with: token ids [T] int64, and what goes to every layer."""
        kv.will_write(self._written_blocks(kv.block_size))
        metadata = AttentionMetadata.build(
            starts=self.starts,
            num_tokens=self.num_tokens,
            block_ids=self.block_ids,
            block_size=kv.block_size,
            device=device,
            tree_masks=ids_on(self._tree_masks(), device) if self.trees else None,
        )
        context = ForwardContext(
            ids_on(self._positions(), device),
            metadata,
            kv,
            states=self._state_sequences() if self.states else None,
            num_encoder_tokens=self.num_encoder_tokens,
        )
        return ids_on(self.token_ids, device), context

    def _written_blocks(self, block_size: int) -> Iterator[int]:
        """Yield the blocks that get keys and values."""
        return chain.from_iterable(
            block_ids[start // block_size :] for start, block_ids in zip(self.starts, self.block_ids, strict=True)
        )

    def _state_sequences(self) -> StateSequences:
        """Return what happens to the states of the sequences."""
        first_rows = accumulate(self.num_tokens, initial=0)
        columns = zip(first_rows, self.starts, self.num_tokens, self.states, strict=False)
        return StateSequences(
            [
                StateSequence(
                    first_row,
                    num_tokens,
                    use.source,
                    use.target,
                    [(position - start, slot) for position, slot in use.saves],
                )
                for first_row, start, num_tokens, use in columns
            ]
        )

    def _positions(self) -> list[int]:
        """Return each token's place in its sequence; of a tree's nodes, on their branch."""
        positions: list[int] = []
        for start, number, parents in zip(self.starts, self.num_tokens, self._parents(), strict=True):
            stop = start + number - len(parents)
            positions += range(start, stop)
            if parents:
                positions += [stop - 1 + depth for depth in depths(parents)]
        return positions

    def _tree_masks(self) -> list[int]:
        """Return each token's tree mask, as `AttentionMetadata` has them."""
        masks: list[int] = []
        for number, parents in zip(self.num_tokens, self._parents(), strict=True):
            masks += [-1] * (number - len(parents))
            shift = TREE_POSITIONS - len(parents)
            masks += [_signed((1 << shift) - 1 | mask << shift) for mask in branch_masks(parents)]
        return masks

    def _parents(self) -> list[tuple[int, ...]]:
        return self.trees or [()] * len(self.starts)


def _token_ids(entry: BatchEntry) -> list[int]:
    token_ids = entry.request.token_ids(entry.start, entry.stop)
    return [*token_ids, *entry.tree.token_ids] if entry.tree else token_ids


def _signed(mask: int) -> int:
    return mask - (1 << TREE_POSITIONS) if mask >> (TREE_POSITIONS - 1) else mask


def _logit_rows(batch: Batch) -> list[list[int]]:
    """Return the rows that are sampled from, if there are some, then each scored prompt's in pieces."""
    ends = list(accumulate(entry.num_rows for entry in batch.entries))
    sampled = [
        row for end, entry in zip(ends, batch.entries, strict=True) for row in range(end - entry.num_sampled, end)
    ]
    found = [sampled] if sampled else []
    for end, entry in zip(ends, batch.entries, strict=True):
        scored = range(end - entry.num_rows, end - entry.num_rows + entry.num_scored)
        found += [list(scored[at : at + PROMPT_CHUNK]) for at in range(0, len(scored), PROMPT_CHUNK)]
    return found


def _pooled_rows(batch: Batch) -> list[list[int]]:
    """Return the rows of each entry that become a vector, or a part of one."""
    starts = accumulate((entry.num_rows for entry in batch.entries), initial=0)
    placed = zip(starts, batch.entries, strict=False)
    return [[start + row for row in entry.pooled] for start, entry in placed if entry.pooled]
