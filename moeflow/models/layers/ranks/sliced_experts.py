"""A layer's experts where every rank has a slice of each: all ranks do the same work, whatever routers choose.

The layers of the sliced experts paper's algorithm 1, for tokens that all ranks have; `own_tokens.py` exchanges tokens
where each rank has its own. An all-gather of hidden units replaces the sum of partial outputs, so that each rank
computes some outputs from all units. No sum is cut, and results are those of one process to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeflow.kernels.cpu.expert_slices import PackedExpertSlices
from moeflow.models.layers.expert_weights import Destination, ExpertWeights
from moeflow.parallel.columns import Columns


class SlicedExperts(ExpertWeights):
    """This rank's slice of one layer's experts, or of a dense network as one expert."""

    def __init__(self, own: PackedExpertSlices, units: Columns, outputs: Columns) -> None:
        """Take this rank's slices, and how the units and the outputs of an expert are cut."""
        self._own, self._units, self._outputs = own, units, outputs

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `ExpertWeights`. Blocks: until the other ranks are through, too. Raises: GroupError."""
        own_residual = None if residual is None else self._outputs.of(residual)
        return self._outputs.gather(self._own_outputs(hidden, topk_ids, topk_weights, own_residual))

    def own_sums(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """See `SharedExperts`."""
        return self._outputs.scatter(self._own_outputs(hidden, topk_ids, topk_weights, None), num_tokens)

    def _own_outputs(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None) -> Tensor:
        """Return this rank's outputs of all tokens, [T, own]."""
        units = self._units.gather(self._own.units(hidden, topk_ids))
        return self._own.sums(units, topk_ids, topk_weights, residual)

    def parts(self) -> Sequence[tuple[Destination, ...]]:
        """Return this rank's rows of each expert's matrices."""
        return self._own.parts()
