"""The expert layer on a GPU, without synchronization. The reference is `kernels/experts.py`.

There are three forms, by the number of pairs of a token and one of its experts:

- *pairs*, up to half as many as experts: a program for each pair and block of outputs. Nothing is sorted, and few
  experts are read twice.
- *experts*, up to 512 pairs: a program for each expert and block of outputs. It reads weights once for all its rows.
- *tiles*: pairs sorted by expert, a program for each tile of rows and block of outputs. For bfloat16 on sm_90, torch's
  grouped products take their place (`grouped_products.py`).

Within a form the result of a token does not depend on others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from moeflow.kernels.activation import Activation
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton import grouped_products
from moeflow.kernels.triton.expert_kernels import sort_kernel, sum_kernel
from moeflow.kernels.triton.launching import launch
from moeflow.kernels.triton.matrix_products import Matrices, Pairs
from moeflow.kernels.triton.planar_weights import PlanarWeights

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import DType

_MOST_SCANNED = 512  # pairs that each program of the form by experts looks through
_SORT_BLOCK = 2048  # ids at a time
_SUM_BLOCK = 512  # outputs of a program


def fused_experts(
    x: Tensor,
    gate_up: Tensor | PlanarWeights,
    down: Tensor | PlanarWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    function: Activation = "silu",
    biases: ExpertBiases | None = None,
    residual: Tensor | None = None,
    slots: Tensor | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts plus the residual, as the reference does.

    `slots` [E] int32 numbers the matrices of each expert. An expert with a negative slot contributes 0. Matrices of a
    tensor are contiguous, at any distance from each other. The result is in `dtype`, None: in x's. Launches: 3, or for
    more than 512 pairs 4, beside those of torch in grouped products.
    """
    num_experts = len(gate_up) if slots is None else len(slots)
    pairs = Pairs(topk_ids.contiguous(), num_experts, range(num_experts), slots)
    results = expert_results(x, gate_up, down, pairs, function, biases)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _weigh(results, topk_weights, pairs, out, residual)
    return out


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
    """Return the same sum, and that normalised. Launches: as above."""
    gate_up, down = matrices
    pairs = Pairs(topk_ids.contiguous(), len(gate_up), range(len(gate_up)))
    results = expert_results(x, gate_up, down, pairs, function, biases)
    out, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _weigh(results, topk_weights, pairs, out, residual, norm, normed)
    return out, normed


def expert_pairs(
    x: Tensor,
    gate_up: Tensor | PlanarWeights,
    down: Tensor | PlanarWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: range,
    *,
    function: Activation = "silu",
    biases: ExpertBiases | None = None,
) -> Tensor:
    """Return the weighted results of some experts, and 0 for others: [T, K, H] float32. Launches: as above."""
    pairs = Pairs(topk_ids.contiguous(), len(gate_up), experts)
    results = expert_results(x, gate_up, down, pairs, function, biases)
    out = torch.empty((*topk_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    _weigh(results, topk_weights, pairs, out, None)
    return out


def expert_results(
    x: Tensor,
    gate_up: Tensor | PlanarWeights,
    down: Tensor | PlanarWeights,
    pairs: Pairs,
    function: Activation,
    biases: ExpertBiases | None,
) -> Tensor:
    """Return the outputs of pairs: [T * K, H]. Rows of experts that are not computed are not written.

    Shapes: x [T, H], or with inputs of shared experts after the others' [2 T, H].
    """
    is_long = pairs.num_pairs > _MOST_SCANNED
    if is_long and grouped_products.computes(x, gate_up, down, pairs, has_biases=biases is not None):
        return grouped_products.grouped_results(x, gate_up, down, pairs, *_sort(pairs), function)
    up_bias, down_bias = biases or (None, None)
    ups = Matrices(gate_up, up_bias, is_gated=gate_up.shape[1] != down.shape[2], function=function)
    downs = Matrices(down, down_bias)
    units, results = (
        torch.empty((pairs.num_pairs, matrices.num_outputs), dtype=x.dtype, device=x.device)
        for matrices in (ups, downs)
    )
    top_k = pairs.ids.shape[1]
    steps = ((ups, x.contiguous(), units, top_k), (downs, units, results, 1))
    if is_long:
        order, spans = _sort(pairs)
        for matrices, rows, out, rows_share in steps:
            matrices.by_tiles(rows, out, pairs, order, spans, rows_share)
    else:
        is_few = pairs.num_pairs <= max(pairs.num_experts // 2, top_k)
        for matrices, rows, out, rows_share in steps:
            (matrices.by_pairs if is_few else matrices.by_experts)(rows, out, pairs, rows_share)
    return results


def _sort(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return the pairs in the order of experts, and where the pairs of each begin and how many they are."""
    order = torch.empty(pairs.num_pairs, dtype=torch.int32, device=pairs.ids.device)
    spans = torch.empty((2, pairs.num_experts), dtype=torch.int32, device=pairs.ids.device)
    launch(
        sort_kernel,
        (pairs.num_experts,),
        pairs.ids,
        pairs.given_slots,
        order,
        spans,
        pairs.num_pairs,
        pairs.num_experts,
        pairs.experts.start,
        pairs.experts.stop,
        has_slots=pairs.slots is not None,
        block=min(triton.next_power_of_2(pairs.num_pairs), _SORT_BLOCK),
    )
    return order, spans


def _weigh(
    results: Tensor,
    topk_weights: Tensor,
    pairs: Pairs,
    out: Tensor,
    residual: Tensor | None,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
) -> None:
    """Write weighted results to out [T, K, H], or their sums with the residual to out [T, H], and perhaps `normed`."""
    num_tokens, top_k = pairs.ids.shape
    hidden = results.shape[1]
    block = triton.next_power_of_2(hidden)
    if norm is None:
        block = min(block, _SUM_BLOCK)
    bias = None if norm is None else norm.bias
    launch(
        sum_kernel,
        (num_tokens, triton.cdiv(hidden, block)),
        results,
        pairs.ids,
        topk_weights.contiguous(),
        pairs.given_slots,
        results if residual is None else residual.contiguous(),
        out,
        results if norm is None else norm.weight,
        results if bias is None else bias,
        results if normed is None else normed,
        0.0 if norm is None else norm.eps,
        pairs.experts.start,
        pairs.experts.stop,
        hidden=hidden,
        top_k=top_k,
        is_summed=out.dim() == 2,
        has_slots=pairs.slots is not None,
        has_residual=residual is not None,
        has_norm=norm is not None,
        subtracts_mean=norm is not None and norm.subtracts_mean,
        has_norm_bias=bias is not None,
        block=block,
        num_warps=min(max(block // 256, 1), 16),
    )
