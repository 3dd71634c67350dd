"""Chosen and shared experts that have inputs and norms of their own, in one stack of matrices.

Shared experts come after the others, see `Routing`. Each kind gets the normalised hidden states times weights of its
own. The sum of each kind is normalised, then the sum of both, before it is added to the hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.activation import Activation
from moeflow.kernels.experts import fused_experts
from moeflow.kernels.norm import NormWeights, PostNorms, add_normalised, normalise
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.triton.planar_weights import PlanarWeights

with on_demand(__name__):
    from moeflow.kernels.triton import normed_experts as triton_normed


def expert_inputs(x: Tensor, hidden: Tensor, plain: NormWeights, norms: PostNorms) -> tuple[Tensor, Tensor]:
    """Return the hidden states plus normalised x, and of these the inputs of chosen experts, shared ones and router.

    `plain` is a norm without weights. Shapes: x and hidden [T, H] -> [T, H], [3, T, H].
    """
    assert norms.experts is not None, "experts have norms of their own"
    if launching.accepts(x):
        return triton_normed.expert_inputs(x, hidden, plain.eps, norms.attention, norms.experts)
    hidden = add_normalised(hidden, x, norms.attention)
    normed, own = normalise(hidden, plain), norms.experts
    router = normed * own.router_scale * own.router_weights
    return hidden, torch.stack([normed * own.chosen_weights, normed * own.shared_weights, router])


def normed_experts(
    inputs: Tensor,
    matrices: tuple[Tensor | PlanarWeights, Tensor | PlanarWeights],
    chosen: tuple[Tensor, Tensor],
    num_shared: int,
    hidden: Tensor,
    norms: PostNorms,
    *,
    function: Activation,
    next_norm: NormWeights,
) -> tuple[Tensor, Tensor]:
    """Return a layer's result, and that normalised for the next one.

    Matrices are as in `fused_experts`; chosen are topk_ids and topk_weights.
    Shapes: inputs [2, T, H] from `expert_inputs`, chosen [T, K + shared experts], hidden [T, H] -> [T, H] twice.
    """
    if len(hidden) and launching.accepts(hidden):
        return triton_normed.normed_experts(
            inputs, matrices, chosen, num_shared, hidden, norms, function=function, next_norm=next_norm
        )
    assert norms.experts is not None, "experts have norms of their own"
    topk_ids, topk_weights = chosen
    top_k = topk_ids.shape[1] - num_shared
    parts = (slice(top_k), slice(top_k, None))
    found, shared = (
        fused_experts(x, *matrices, topk_ids[:, part], topk_weights[:, part], function=function)
        for x, part in zip(inputs, parts, strict=True)
    )
    total = add_normalised(normalise(shared, norms.experts.shared), found, norms.experts.chosen)
    out = add_normalised(hidden, total, norms.feed_forward, norms.scale)
    return out, normalise(out, next_norm)
