"""What one pass must read and compute at the least, from the model's shape: the floor that speed is held against.

Weights are read once a pass, whatever the batch; of the experts, those that somebody's router chose. How many
distinct ones a batch hits is taken as if routers chose evenly and independently. Norms, activations and the
embedding rows are left out (under 1%). Knows no model file and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class PassCost:
    """The least that a pass costs."""

    num_bytes: float
    num_flops: float


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return how many experts of a layer that many tokens reach, on average."""
    if num_experts == 0:
        return 0.0
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def pass_cost(
    shape: ModelConfig,
    *,
    weight_bits: float,
    embedding_bits: float,
    kv_bytes_per_token: float,
    num_tokens: int,
    num_sampled: int,
    num_seen: int,
) -> PassCost:
    """Return what a pass of `num_tokens` costs.

    Values take `weight_bits`, those of the output projection `embedding_bits`.
    num_sampled of its tokens choose a next one (only they need logits); num_seen counts, over all its tokens,
    the positions that attention looks at. Their K and V (so many bytes over all layers) count as read once a
    token, which is true of decode; a prefill reads them together, next to nothing beside the weights.
    """
    moe_layers = shape.num_layers - len(shape.dense_layers) if shape.num_experts else 0
    ffn_layers = 0 if shape.num_experts else shape.num_layers
    attention = shape.num_layers * shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    router = moe_layers * shape.hidden_size * shape.num_experts
    expert = 3 * shape.hidden_size * shape.intermediate_size
    dense = ffn_layers * expert + 3 * shape.hidden_size * shape.dense_intermediate_size * len(shape.dense_layers)
    head = shape.vocab_size * shape.hidden_size if num_sampled else 0

    read_experts = moe_layers * expert * distinct_experts(shape.num_experts, shape.top_k, num_tokens)
    read = ((attention + router + dense + read_experts) * weight_bits + head * embedding_bits) / 8
    read_kv = num_seen * kv_bytes_per_token
    per_token = attention + router + dense + moe_layers * expert * shape.top_k
    attend = 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_seen
    return PassCost(read + read_kv, 2.0 * (per_token * num_tokens + head * num_sampled) + attend)
