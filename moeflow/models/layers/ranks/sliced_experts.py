"""A layer's experts where every rank has a slice of each: all ranks do the same work, whatever routers choose.

After algorithm 1 of the sliced experts paper. Since all ranks know all tokens and route them alike, it needs neither
the exchange of counts nor that of tokens, and stays dropless. Two all-gathers replace the reduce-scatter of partial
outputs: of hidden units, computed in parts by the ranks, and of outputs, computed from all units. So no
sum is cut, and results are those of one process to the bit.
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
        units = self._units.gather(self._own.units(hidden, topk_ids))
        own_residual = None if residual is None else self._outputs.of(residual)
        return self._outputs.gather(self._own.sums(units, topk_ids, topk_weights, own_residual))

    def parts(self) -> Sequence[tuple[Destination, ...]]:
        """Return this rank's rows of each expert's matrices."""
        return self._own.parts()
