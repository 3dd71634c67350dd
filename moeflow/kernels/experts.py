"""The expert layer: every token through the experts its router chose, none dropped, none padded.

(Token, expert) pairs are sorted by expert, and each used expert runs once over its rows. A token's results are added in
its router's order, which does not depend on other tokens. This is the reference: it asks the device once per layer how
many rows each expert got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from moeflow.kernels.activation import Activation, activate
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.linear import linear
from moeflow.kernels.norm import NormWeights, normalise
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.triton.planar_weights import PlanarWeights

with on_demand(__name__):
    from moeflow.kernels.triton import experts as triton_experts


ExpertMatrices: TypeAlias = "Tensor | Sequence[Tensor] | PlanarWeights"


def fused_experts(
    x: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    function: Activation = "silu",
    biases: ExpertBiases | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, `down(function(gate(x)) * up(x))`, plus the residual.

    Where `gate_up` is as high as `down` is wide there is no gate: `down(function(up(x)))`. The sum over a token's
    experts runs in float32 whatever x is.

    Shapes: x and residual [T, H], gate_up [E, 2I, H] (gate rows first) or [E, I, H], down [E, H, I], both also as E
    matrices, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H] in x's dtype.
    Blocks: without Triton once, until the device knows topk_ids.
    """
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    if launching.accepts(x) and not (isinstance(gate_up, Sequence) or isinstance(down, Sequence)):
        return triton_experts.fused_experts(
            x, gate_up, down, topk_ids, topk_weights, function=function, biases=biases, residual=residual
        )
    layer = _GivenExperts(gate_up, down, function, biases)
    if num_tokens == 1:  # nothing to sort: spares a decode eight small operations a layer
        pairs = torch.cat([layer.run_expert(x, expert) for expert in topk_ids[0].tolist()])
    else:
        pairs = layer.run_sorted(x, topk_ids)
    weighted = pairs.view(num_tokens, top_k, -1).float().mul_(topk_weights.unsqueeze(-1))
    out = weighted.sum(dim=1).to(x.dtype)
    return out if residual is None else out.add_(residual)


def fused_experts_norm(
    x: Tensor,
    matrices: tuple[Tensor | PlanarWeights, Tensor | PlanarWeights],
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    function: Activation,
    biases: ExpertBiases | None,
    residual: Tensor,
    norm: NormWeights,
) -> tuple[Tensor, Tensor]:
    """Return what `fused_experts` does for gate_up and down, and that normalised. Shapes: as there -> [T, H] twice."""
    given: dict[str, Any] = {"function": function, "biases": biases, "residual": residual}
    if len(x) and launching.accepts(x):
        return triton_experts.fused_experts_norm(x, matrices, topk_ids, topk_weights, norm=norm, **given)
    total = fused_experts(x, *matrices, topk_ids, topk_weights, **given)
    return total, normalise(total, norm)


def expert_pairs(
    x: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: range,
    *,
    function: Activation = "silu",
    biases: ExpertBiases | None = None,
) -> Tensor:
    """Return the weighted results of some experts only, one for each token and choice; other choices get 0.

    Shapes: as for `fused_experts` -> [T, K, H] float32. Blocks: without Triton until the device knows topk_ids.
    """
    if len(x) and launching.accepts(x) and not (isinstance(gate_up, Sequence) or isinstance(down, Sequence)):
        return triton_experts.expert_pairs(
            x, gate_up, down, topk_ids, topk_weights, experts, function=function, biases=biases
        )
    is_computed = (topk_ids >= experts.start) & (topk_ids < experts.stop)
    return _GivenExperts(gate_up, down, function, biases).weighted_pairs(x, topk_ids, topk_weights, is_computed)


class ExpertsInSlots(msgspec.Struct, frozen=True):
    """Some experts of a layer, in slots whose contents may change between passes."""

    gate_up: Tensor | PlanarWeights  # [slots, 2I, H] or [slots, I, H]
    down: Tensor | PlanarWeights  # [slots, H, I]
    slots: Tensor  # [E] int32, negative: no slot
    function: Activation = "silu"
    biases: ExpertBiases | None = None  # of all experts

    def sums(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, total: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts that have slots, plus a total of others.

        Shapes: as for `fused_experts`; total [T, H] float32 -> [T, H] float32.
        Blocks: without Triton until the device knows topk_ids.
        """
        if launching.accepts(x):
            return triton_experts.fused_experts(
                x,
                self.gate_up,
                self.down,
                topk_ids,
                topk_weights,
                function=self.function,
                biases=self.biases,
                residual=total,
                slots=self.slots,
                dtype=torch.float32,
            )
        layer = _GivenExperts(self.gate_up, self.down, self.function, self.biases, self.slots.tolist())
        weighted = layer.weighted_pairs(x, topk_ids, topk_weights, (self.slots >= 0)[topk_ids])
        out = weighted.sum(dim=1)
        return out if total is None else out.add_(total)


class _GivenExperts(msgspec.Struct, frozen=True):
    """The weights that `fused_experts` was given."""

    gate_up: ExpertMatrices
    down: ExpertMatrices
    function: Activation
    biases: ExpertBiases | None
    slots: list[int] | None = None  # of the matrices of each expert; None: experts are in order

    @property
    def num_experts(self) -> int:
        """How many the layer has."""
        return len(self.gate_up) if self.slots is None else len(self.slots)

    def weighted_pairs(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, is_computed: Tensor) -> Tensor:
        """Return the weighted results of some pairs, and 0 for others: [T, K, H] float32."""
        (num_tokens, top_k), ids = topk_ids.shape, topk_ids.flatten()
        pairs = is_computed.flatten().nonzero().flatten()
        pairs = pairs[ids[pairs].argsort(stable=True)]
        counts = torch.bincount(ids[pairs], minlength=self.num_experts).tolist()
        rows = torch.split(x.index_select(0, pairs.div(top_k, rounding_mode="floor")), counts)
        results = [self.run_expert(part, expert) for expert, part in enumerate(rows) if len(part)]
        out = torch.zeros(num_tokens * top_k, x.shape[1], device=x.device)
        if results:
            weighted = torch.cat(results).float().mul_(topk_weights.flatten()[pairs].unsqueeze(-1))
            out.index_copy_(0, pairs, weighted)
        return out.view(num_tokens, top_k, x.shape[1])

    def run_sorted(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Return each expert's result for each token that chose it: [T * K, H], in the order of topk_ids."""
        expert_of_pair = topk_ids.flatten()
        order = expert_of_pair.argsort(stable=True)
        rows = x.index_select(0, order.div(topk_ids.shape[1], rounding_mode="floor"))
        counts = torch.bincount(expert_of_pair, minlength=len(self.gate_up)).tolist()
        results = [
            self.run_expert(part, expert) for expert, part in enumerate(torch.split(rows, counts)) if counts[expert]
        ]
        return torch.empty_like(rows).index_copy_(0, order, torch.cat(results))

    def run_expert(self, rows: Tensor, expert: int) -> Tensor:
        """Shapes: rows [n, H] -> [n, H]."""
        up_bias, down_bias = (bias[expert] for bias in self.biases) if self.biases else (None, None)
        slot = expert if self.slots is None else self.slots[expert]
        gate_up, down = (matrices[slot].to(rows.dtype) for matrices in (self.gate_up, self.down))
        units = linear(rows, gate_up, up_bias)
        units = activate(self.function, units, is_gated=len(gate_up) != down.shape[1])
        return linear(units, down, down_bias)
