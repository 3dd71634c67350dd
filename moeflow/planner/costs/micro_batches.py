"""Into how many micro-batches a pass is cut, so that the stages of a model compute at the same time.

A pass of N tokens goes through S stages in M micro-batches, all of which follow each other: that takes M + S - 1 turns
(GPipe, section 2.3), each as long as a stage needs for N / M tokens. More micro-batches leave stages idle for a smaller
part of the time; but each of them reads the stage's weights anew, and is a message. So a prompt is cut, and a few
sequences that each bring one token are not: reading weights is nearly all that these do.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.parallel_config import MicroBatchCosts
from moeflow.planner.costs.model_costs import ModelCosts, bits_per_value, expected_distinct

MOST_PER_STAGE: Final = 4  # micro-batches; then stages are idle for a fifth of the time at most
HAND_OVER_S: Final = 3e-4  # of a micro-batch in each stage: preparing it, and its message


_READ_BYTES_PER_S: Final = 1e10  # of weights, and ...
_FLOPS_PER_S: Final = 1e11  # ... of products: what counts is the ratio, some 10 operations a byte, usual for processors


def micro_batch_costs(costs: ModelCosts) -> MicroBatchCosts:
    """Return what passes of a model cost, head and embeddings left out."""
    shape = costs.shape
    routers_bytes = costs.num_moe_layers * costs.router_values * bits_per_value(costs.formats.of_routers) / 8
    outside = shape.num_layers * (costs.qkv_values + costs.output_values) + costs.num_dense_layers * costs.dense_values
    outside += costs.num_moe_layers * costs.shared_values
    used = outside + costs.num_moe_layers * (costs.router_values + shape.top_k * costs.expert_values)
    return MicroBatchCosts(
        fixed_s=(outside * costs.formats.weight_bytes + routers_bytes) / _READ_BYTES_PER_S,
        expert_s=costs.num_moe_layers * costs.expert_bytes / _READ_BYTES_PER_S,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        token_s=2.0 * used / _FLOPS_PER_S,
    )


def num_micro_batches(num_tokens: int, num_stages: int, costs: MicroBatchCosts) -> int:
    """Return the number with which a pass takes the shortest time, as far as costs tell."""
    if num_stages == 1:
        return 1
    candidates = range(1, min(num_tokens, MOST_PER_STAGE * num_stages) + 1)
    return min(candidates, key=lambda number: pass_s(number, num_tokens, num_stages, costs))


def pass_s(number: int, num_tokens: int, num_stages: int, costs: MicroBatchCosts) -> float:
    """Return how long a pass takes in so many micro-batches, through stages of equal costs."""
    tokens = num_tokens / number
    distinct = expected_distinct(costs.num_experts, costs.top_k, tokens)
    whole_s = costs.fixed_s + distinct * costs.expert_s + tokens * costs.token_s
    return (number + num_stages - 1) * (whole_s / num_stages + HAND_OVER_S)
