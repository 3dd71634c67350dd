"""A layer's experts shared by two processors: the owner of the first ones sums theirs, the other adds the rest.

A token's experts are added up in ascending order, so of those below the border only the sum is needed. Packed, the
results are those of one processor to the bit, wherever the border is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.experts import expert_pairs
from moeflow.kernels.on_demand import torch
from moeflow.models.layers.expert_weights import ExpertSlabs, MovableExperts

if TYPE_CHECKING:
    from torch import Tensor


class RoutedTokens(NamedTuple):
    """What experts compute with."""

    hidden: Tensor  # [T, H], normalised
    topk_ids: Tensor  # [T, K] int64
    topk_weights: Tensor  # [T, K] float32

    def rows(self, numbers: Tensor) -> RoutedTokens:
        """Return some tokens. Shapes: numbers [n] int64."""
        return RoutedTokens(*(part.index_select(0, numbers) for part in self))


def experts_below(border: int, experts: MovableExperts, routed: RoutedTokens) -> Tensor:
    """Return the weighted sum over each token's experts with a number below the border: [T, H] float32."""
    pairs = _pairs(experts, routed, range(border))
    return pairs.sum(dim=1) if isinstance(experts, ExpertSlabs) else _added_up(pairs, routed)


def experts_from(
    border: int, experts: MovableExperts, routed: RoutedTokens, below: tuple[Tensor, Tensor], residual: Tensor | None
) -> Tensor:
    """Return the weighted sum over each token's experts; experts below the border were computed before.

    It is added to the residual, if there is one.
    Shapes: residual [T, H], below: the tokens that chose any of those [n] int64, and the sums for them [n, H] float32
    -> [T, H].
    """
    pairs = _pairs(experts, routed, range(border, experts.num_experts))
    rows, sums = below
    pairs[rows, routed.topk_ids[rows].argmin(dim=1)] = sums
    if isinstance(experts, ExpertSlabs):
        total = pairs.sum(dim=1).to(routed.hidden.dtype)
        return total if residual is None else total.add_(residual)
    return _added_up(pairs, routed, residual)


def _pairs(experts: MovableExperts, routed: RoutedTokens, some: range) -> Tensor:
    """Return the weighted results of some experts, and 0 for others: [T, K, H] float32."""
    if isinstance(experts, ExpertSlabs):
        return expert_pairs(
            routed.hidden,
            experts.gate_up,
            experts.down,
            routed.topk_ids,
            routed.topk_weights,
            some,
            function=experts.kind.function,
            biases=experts.biases,
        )
    pairs = torch.zeros(routed.topk_ids.numel(), routed.hidden.shape[1])
    in_order = {expert: expert for expert in some}
    SlotExperts(experts, experts.num_experts, in_order, experts.biases).pairs(*routed, pairs)
    return pairs.view(*routed.topk_ids.shape, routed.hidden.shape[1])


def _added_up(pairs: Tensor, routed: RoutedTokens, residual: Tensor | None = None) -> Tensor:
    return add_pairs(pairs.flatten(0, 1), routed.topk_ids, residual)
