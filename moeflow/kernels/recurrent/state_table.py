"""The sequences of a pass and the slots of their states, in the form that kernels on a GPU read.

A sequence may start from a state that an earlier one of the same pass stores. Both then belong to one chain. Chains
compute at the same time, the sequences of a chain one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_TOKENS: Final = 32  # that kernels compute at once, by products of matrices


class StateTable(msgspec.Struct, frozen=True):
    """The sequences of a pass, chain by chain, on a device."""

    # [5, S] int32. Of each sequence: its first token in the pass. The slot of the state before it (negative: zero).
    # The index of its first store. The end of its stores (without stores nothing is computed). The end of the chain
    # that it begins (at most its own index: it continues a chain).
    sequences: Tensor
    # [2, n] int32. Of each store: the number of the sequence's tokens before it, ascending. The slot (negative: nothing
    # is stored). The last store of a sequence comes after all of its tokens.
    stores: Tensor
    max_tokens: int  # of a sequence in this pass, at most
    # [2, n] int32. Of each chunk, at most `CHUNK_TOKENS` between two stores: its first token in the pass, and its
    # number of tokens. None: all sequences are shorter, and their tokens are computed one after another.
    chunks: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences, padding included: each is a program of its kernels' grids."""
        return self.sequences.shape[1]
