"""Choice of experts, one program for each token. The reference is `kernels/routing.py`.

A token's logits are read once: 512 bytes at 128 experts in float32. One warp holds up to 512 of them, so that each
maximum is a few shuffles without a barrier. The latency of `top_k` maxima bounds the kernel, not memory.
The router's product stays a launch of its own. One processor would read its 512 KiB (128 experts, 2048 wide) alone,
which takes several microseconds. More processors would have to wait for each other before the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_ONE_WARP = 512  # experts


@triton.jit
def sort_key(x):
    """Return integers in the order of float32 numbers, as torch sorts them: NaN is the largest, zeros are equal."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def best_free(keys, numbers, is_free):
    """Return the number of the largest free key, of equals the first. Shapes: [G, S] each -> a scalar."""
    lowest: tl.constexpr = -0x80000000
    free = tl.where(is_free, keys, lowest)
    best = tl.max(tl.max(free, axis=1), axis=0)
    candidates = tl.where(is_free & (keys == best), numbers, 0x7FFFFFFF)
    return tl.min(tl.min(candidates, axis=1), axis=0)


@triton.jit
def value_at(values, numbers, number):
    """Return the value at a number. Shapes: values and numbers [G, S] -> a scalar."""
    return tl.sum(tl.sum(tl.where(numbers == number, values, 0.0), axis=1), axis=0)


@triton.jit
def candidate_ranks(ranks, is_inside, num_groups, num_chosen: tl.constexpr, sums_two: tl.constexpr):
    """Return ranks with -inf outside the best groups, of equal groups the first ones. Shapes: [G, S] -> the same."""
    groups = tl.arange(0, ranks.shape[0])
    columns = tl.arange(0, ranks.shape[1])[None, :]
    inside = tl.where(is_inside, ranks, float("-inf"))
    has_nan = tl.max((inside != inside).to(tl.int32), axis=1) > 0
    worth = tl.max(inside, axis=1)
    if sums_two:
        at_best = tl.min(tl.where(inside == worth[:, None], columns, ranks.shape[1]), axis=1)
        worth += tl.max(tl.where(columns == at_best[:, None], float("-inf"), inside), axis=1)
    keys = tl.where(has_nan, 0x7FFFFFFF, sort_key(worth))[:, None]
    is_free = (groups < num_groups)[:, None]
    is_chosen = groups[:, None] < 0
    for _ in range(num_chosen):
        chosen = groups[:, None] == best_free(keys, groups[:, None], is_free)
        is_chosen = is_chosen | chosen
        is_free = is_free & ~chosen
    return tl.where(is_chosen, ranks, float("-inf"))


@triton.jit
def sparsemixer_weight(logits, is_free, best, jitter):
    """Return the share of the best free logit among free ones that are not far below it. Shapes: [G, S] -> a scalar."""
    distances = tl.div_rn(best - logits, tl.maximum(tl.abs(logits), tl.zeros_like(logits) + best))
    is_near = is_free & ~(distances > 2.0 * jitter)
    return 1.0 / tl.sum(tl.sum(tl.where(is_near, tl.exp(logits - best), 0.0), axis=1), axis=0)


@triton.jit
def routing_kernel(
    logits_ptr,
    bias_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    epsilon,
    min_total,
    scale,
    jitter,
    group_size,
    num_groups,
    num_chosen_groups: tl.constexpr,
    top_k: tl.constexpr,
    num_shared: tl.constexpr,
    score: tl.constexpr,
    sums_two: tl.constexpr,
    renormalizes: tl.constexpr,
    has_bias: tl.constexpr,
    has_scales: tl.constexpr,
    has_shared_gate: tl.constexpr,
    block_groups: tl.constexpr,
    block_size: tl.constexpr,
    block_k: tl.constexpr,
):
    """Choose the experts of token `program_id(0)`, and append the shared ones.

    Shapes: logits [T, E], in rows of `stride`, with a gate [T, E + 1]. Bias and scales [E]. Ids and weights [T, top_k +
    num_shared].
    """
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, block_groups)[:, None]
    columns = tl.arange(0, block_size)[None, :]
    numbers = groups * group_size + columns
    is_inside = (groups < num_groups) & (columns < group_size)
    logits = tl.load(logits_ptr + token * stride + numbers, mask=is_inside, other=float("-inf")).to(tl.float32)
    if score == "softmax":
        powers = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = tl.div_rn(powers, tl.zeros_like(powers) + tl.sum(tl.sum(powers, axis=1), axis=0))
    else:  # SparseMixer does not use them
        scores = 1.0 / (1.0 + tl.exp(-logits))
    ranks = logits  # finer than scores, and in the same order
    if has_bias:
        ranks = scores + tl.load(bias_ptr + numbers, mask=is_inside, other=0.0)
    elif sums_two:
        ranks = scores
    if block_groups > 1:
        ranks = candidate_ranks(ranks, is_inside, num_groups, num_chosen_groups, sums_two)
    keys = sort_key(ranks)
    is_free = is_inside
    places = tl.arange(0, block_k)
    ids = tl.zeros([block_k], tl.int32)
    weights = tl.zeros([block_k], tl.float32)
    for place in range(top_k):
        expert = best_free(keys, numbers, is_free)
        if score == "sparsemixer":
            weight = sparsemixer_weight(logits, is_free, value_at(logits, numbers, expert), jitter)
        else:
            weight = value_at(scores, numbers, expert)
        ids = tl.where(places == place, expert, ids)
        weights = tl.where(places == place, weight, weights)
        is_free = is_free & (numbers != expert)
    if renormalizes:
        total = tl.sum(weights, axis=0) + epsilon
        total = tl.where(total < min_total, min_total, total)
        weights = tl.div_rn(weights, tl.zeros_like(weights) + total)
    weights *= scale
    is_place = places < top_k
    if has_scales:
        weights *= tl.load(scales_ptr + ids, mask=is_place, other=0.0)
    if num_shared > 0:
        num_experts = num_groups * group_size
        share = 1.0
        if has_shared_gate:
            share = tl.sigmoid(tl.load(logits_ptr + token * stride + num_experts).to(tl.float32))
        ids = tl.where(is_place, ids, num_experts + places - top_k)
        weights = tl.where(is_place, weights, share)
        is_place = places < top_k + num_shared
    outputs = token * (top_k + num_shared) + places
    tl.store(ids_ptr + outputs, ids.to(tl.int64), mask=is_place)
    tl.store(weights_ptr + outputs, weights, mask=is_place)


def route(router_logits: Tensor, routing: Any) -> tuple[Tensor, Tensor]:
    """Return each token's experts, best first, and their weights, in one launch. `routing` is a `Routing`.

    Shapes: see `Routing`.
    """
    num_tokens, num_logits = router_logits.shape
    num_experts = num_logits - routing.has_shared_gate
    shape = (num_tokens, routing.top_k + routing.num_shared)
    topk_ids = torch.empty(shape, dtype=torch.int64, device=router_logits.device)
    topk_weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    bias, scales = routing.choice_bias, routing.expert_scales
    group_size = num_experts // routing.num_groups
    launch(
        routing_kernel,
        (num_tokens,),
        router_logits,
        router_logits if bias is None else bias,
        router_logits if scales is None else scales,
        topk_ids,
        topk_weights,
        router_logits.stride(0),
        routing.epsilon,
        routing.min_total,
        routing.scale,
        routing.jitter,
        group_size,
        routing.num_groups,
        num_chosen_groups=routing.num_chosen_groups,
        top_k=routing.top_k,
        num_shared=routing.num_shared,
        score=routing.score,
        sums_two=routing.num_groups > 1 and routing.group_score == "top2_sum",
        renormalizes=routing.renormalize,
        has_bias=bias is not None,
        has_scales=scales is not None,
        has_shared_gate=routing.has_shared_gate,
        block_groups=triton.next_power_of_2(routing.num_groups),
        block_size=triton.next_power_of_2(group_size),
        block_k=triton.next_power_of_2(shape[1]),
        num_warps=1 if num_experts <= _ONE_WARP else 4,
    )
    return topk_ids, topk_weights
