"""The number of micro-batches of a pass, so that the stages of a model compute concurrently.

A pass of N tokens goes through S stages in M micro-batches, one behind the other. This takes M + S - 1 turns (GPipe,
section 2.3), each as long as a stage needs for N / M tokens. With more micro-batches, stages idle less, but each
micro-batch reads the stage's weights again and costs a message. So a long prompt is cut. A few decoding sequences are
not: they mostly read weights.
"""

from __future__ import annotations

from typing import Final

from moeflow.core.parallel_config import MicroBatchCosts
from moeflow.planner.costs.model_costs import ModelCosts, expected_distinct

MOST_PER_STAGE: Final = 4  # micro-batches; then stages are idle for a fifth of the time at most
HAND_OVER_S: Final = 3e-4  # of a micro-batch in each stage: preparing it, and its message


_READ_BYTES_PER_S: Final = 1e10  # of weights, and ...
_FLOPS_PER_S: Final = (
    1e11  # ... of products: only the ratio counts, about 10 operations per byte as for usual processors
)


def micro_batch_costs(costs: ModelCosts) -> MicroBatchCosts:
    """Return the costs of a model's passes without head and embeddings."""
    flops_of_token = sum(count * work.num_flops for count, work in costs.pass_works(1, None, 0))
    return MicroBatchCosts(
        fixed_s=(costs.layers_bytes - costs.experts_bytes) / _READ_BYTES_PER_S,
        expert_s=costs.num_moe_layers * costs.expert_bytes / _READ_BYTES_PER_S,
        num_experts=costs.shape.routing.num_experts,
        top_k=costs.shape.routing.top_k,
        token_s=flops_of_token / _FLOPS_PER_S,
    )


def num_micro_batches(num_tokens: int, num_stages: int, costs: MicroBatchCosts) -> int:
    """Return the number with the shortest time of a pass."""
    if num_stages == 1:
        return 1
    candidates = range(1, min(num_tokens, MOST_PER_STAGE * num_stages) + 1)
    return min(candidates, key=lambda number: pass_s(number, num_tokens, num_stages, costs))


def pass_s(number: int, num_tokens: int, num_stages: int, costs: MicroBatchCosts) -> float:
    """Return the seconds of a pass in so many micro-batches through stages of equal costs."""
    tokens = num_tokens / number
    distinct = expected_distinct(costs.num_experts, costs.top_k, tokens)
    whole_s = costs.fixed_s + distinct * costs.expert_s + tokens * costs.token_s
    return (number + num_stages - 1) * (whole_s / num_stages + HAND_OVER_S)
