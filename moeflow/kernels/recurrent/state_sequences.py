"""Where a pass reads and writes the states of its sequences, and the states of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import Array
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.recurrent.state_table import CHUNK_TOKENS, StateTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels import device_arrays

NO_STATE: Final = -1  # as a source: the state is zero


class StateSequence(msgspec.Struct, frozen=True):
    """One sequence's share of a pass."""

    first_row: int  # in the pass
    num_tokens: int
    source: int  # the slot of the state before its tokens; NO_STATE: it is zero
    target: int  # the slot of the state after them
    saves: Sequence[tuple[int, int]] = ()  # (after how many of its tokens, slot) of further copies, in order


class StateSequences:
    """The sequences of a pass, in the order of state reads and writes."""

    def __init__(self, sequences: Sequence[StateSequence], device_table: StateTable | None = None) -> None:
        """`device_table`: the sequences where they are already on a device; then none need be given."""
        self._sequences = tuple(sequences)
        self._device_table = device_table
        saves = [len(sequence.saves) for sequence in sequences]
        columns = [
            [sequence.first_row for sequence in sequences],
            [sequence.num_tokens for sequence in sequences],
            [sequence.source for sequence in sequences],
            [sequence.target for sequence in sequences],
            np.cumsum(saves, dtype=np.int32),
            [count for sequence in sequences for count, _ in sequence.saves],
            [slot for sequence in sequences for _, slot in sequence.saves],
        ]
        # For the CPU extension, which reads it from here: csrc/ops/recurrent.h.
        self.table: NDArray[np.int32] = np.concatenate([np.asarray(column, np.int32) for column in columns])

    def table_on(self, device: torch.device) -> StateTable:
        """Return the sequences as kernels on a GPU read them. One copy, made on first use."""
        if self._device_table is None:
            most = max(it.num_tokens for it in self._sequences)
            chunks = [_chunks(self._sequences)] if most >= CHUNK_TOKENS else []
            sequences, stores, *rest = device_arrays.staged([*host_table(self._sequences), *chunks], device)
            self._device_table = StateTable(sequences, stores, most, *rest)
        return self._device_table

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[StateSequence]:
        return iter(self._sequences)


def host_table(sequences: Sequence[StateSequence]) -> list[NDArray[np.int32]]:
    """Return the two arrays of a `StateTable` in main memory."""
    columns: list[list[int]] = []
    stores: list[tuple[int, int]] = []
    for chain in _chains(sequences):
        first, stop = len(columns), len(columns) + len(chain)
        for sequence in chain:
            begin = len(stores)
            stores += [*sequence.saves, (sequence.num_tokens, sequence.target)]
            columns.append([sequence.first_row, sequence.source, begin, len(stores), stop])
            stop = first  # that of all sequences but the first
    return [_transposed(columns), _transposed(stores)]


def _chunks(sequences: Sequence[StateSequence]) -> NDArray[np.int32]:
    """Return the first token and the number of tokens of each chunk: see `StateTable`."""
    chunks = [
        (sequence.first_row + first, min(CHUNK_TOKENS, stop - first))
        for sequence in sequences
        for start, stop in pairwise([0, *(count for count, _ in sequence.saves), sequence.num_tokens])
        for first in range(start, stop, CHUNK_TOKENS)
    ]
    return _transposed(chunks)


def _chains(sequences: Sequence[StateSequence]) -> list[list[StateSequence]]:
    """Group the sequences, each with the one that stores the state it starts from."""
    chains: list[list[StateSequence]] = []
    storing: dict[int, list[StateSequence]] = {}  # by slot
    for sequence in sequences:
        chain = storing.get(sequence.source)
        if chain is None:
            chains.append(chain := [])
        chain.append(sequence)
        storing.update(dict.fromkeys((sequence.target, *(slot for _, slot in sequence.saves)), chain))
    return chains


def _transposed(rows: Sequence[Any]) -> NDArray[np.int32]:
    return np.ascontiguousarray(np.array(rows, np.int32).T)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer, or the part of each that an operation has."""

    slots: Array  # [slots, values of a state] float32
    offset: int = 0  # where the part begins

    def read(self, slot: int, *shape: int) -> Tensor:
        """Return a copy of the part of a slot; zeros of NO_STATE."""
        if slot == NO_STATE:
            return self.slots.new_zeros(shape)
        return self._part(slot, *shape).clone()

    def write(self, slot: int, state: Tensor) -> None:
        """Set the part of a slot."""
        self._part(slot, *state.shape).copy_(state)

    def _part(self, slot: int, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        return self.slots[slot, self.offset : self.offset + size].view(shape)


class PassStates(msgspec.Struct, frozen=True):
    """The states of all recurrent layers, and what a pass does with them."""

    layers: Sequence[LayerStates]  # one or more
    sequences: StateSequences
