"""The expert layer by the CPU extension where experts lie in slots, all at once or in parts as they come.

The results are those of `PackedExperts.compute` over all experts in order, to the bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import Array, address, floats_like
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats, ids
from moeflow.kernels.cpu.packed_experts import PackedExperts, sum_experts
from moeflow.kernels.expert_biases import ExpertBiases

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


class SlotExperts:
    """Experts of one layer, in the slots of several, for as long as each stays where it is."""

    def __init__(
        self,
        memory: PackedExperts,
        num_experts: int,
        slots: Mapping[int, int],
        biases: ExpertBiases | None = None,
    ) -> None:
        """Take the memory of the slots, seen as experts, how many experts the layer has, the slots of those there, and
        the biases of the layer.

        Raises: ValueError if there is no such slot.
        """
        self._memory, self._biases = memory, biases  # kept for the kernels
        self._table = array("i", [_cpu.ABSENT]) * num_experts
        for expert, slot in slots.items():
            if not 0 <= slot < memory.num_experts:
                raise ValueError(f"there is no slot {slot} among {memory.num_experts}")
            self._table[expert] = slot
        self._layer = memory.in_slots(self._table.buffer_info()[0], num_experts, biases)

    def sums(self, x: Array, topk_ids: Array, topk_weights: Array, residual: Array | None) -> Array:
        """Return what `PackedExperts.compute` does; all experts that are asked for have slots."""
        return sum_experts(self._layer, self._memory.hidden, x, topk_ids, topk_weights, residual)

    def pairs(self, x: Array, topk_ids: Array, topk_weights: Array, pairs: Array) -> None:
        """Write the weighted results of those experts that have slots to the rows of their pairs (token, k).

        Shapes: as there, pairs [T * K, H] float32; other rows stay as they are.
        """
        num_tokens, top_k = topk_ids.shape
        hidden = self._memory.hidden
        _cpu.expert_pairs(
            layer=self._layer,
            x=floats(x, num_tokens, hidden),
            num_tokens=num_tokens,
            top_k=top_k,
            topk_ids=ids(topk_ids),
            topk_weights=floats(topk_weights, num_tokens, top_k),
            out=floats(pairs, num_tokens * top_k, hidden),
        )


class PresentExperts:
    """Experts of one layer in a table of slots that may change between calls."""

    def __init__(self, memory: PackedExperts, table: NDArray[np.int32], biases: ExpertBiases | None = None) -> None:
        """Take the memory of the slots, the slot of each expert, negative: absent, and the layer's biases.

        `biases` None: those of `memory`.
        """
        self._memory, self._table, self._biases = memory, table, biases or memory.biases  # kept for the kernels
        self._layer = memory.in_slots(address(table), len(table), self._biases)

    def sums(self, x: Array, topk_ids: Array, topk_weights: Array, out: Array) -> Callable[[], None]:
        """Return a function that computes with the numbers that these arrays have when it is called.

        It writes the weighted sum of each token's present experts, in ascending order; 0 for a token without any. The
        caller keeps the arrays alive. Shapes: as in `PackedExperts.compute`; out [T, H] float32.
        """
        num_tokens, top_k = topk_ids.shape
        hidden = self._memory.hidden
        return partial(
            _cpu.present_experts,
            layer=self._layer,
            x=floats(x, num_tokens, hidden),
            num_tokens=num_tokens,
            top_k=top_k,
            topk_ids=ids(topk_ids),
            topk_weights=floats(topk_weights, num_tokens, top_k),
            out=floats(out, num_tokens, hidden),
        )


def add_pairs(pairs: Array, topk_ids: Array, residual: Array | None = None) -> Array:
    """Return each token's pairs added up in ascending order of expert, plus the residual; pairs are used up.

    Shapes: pairs [T * K, H] float32, topk_ids [T, K] int64, residual [T, H] -> [T, H].
    """
    num_tokens, top_k = topk_ids.shape
    hidden = pairs.shape[1]
    out = floats_like(pairs, num_tokens, hidden)
    _cpu.add_pairs(
        pairs=floats(pairs, num_tokens * top_k, hidden),
        num_tokens=num_tokens,
        top_k=top_k,
        hidden=hidden,
        topk_ids=ids(topk_ids),
        residual=floats(residual, num_tokens, hidden),
        out=address(out),
    )
    return out
