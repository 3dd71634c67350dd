"""Where a pass reads and writes the states of its sequences, and the states of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import Array

if TYPE_CHECKING:
    from torch import Tensor

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

    def __init__(self, sequences: Sequence[StateSequence]) -> None:
        self._sequences = tuple(sequences)
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

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[StateSequence]:
        return iter(self._sequences)


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
