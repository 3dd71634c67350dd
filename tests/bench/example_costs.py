"""A shape, and what it costs."""

from __future__ import annotations

import dataclasses

from moeflow.bench.floors import pass_cost
from tests.shapes import TINY

SHAPE = dataclasses.replace(
    TINY,
    vocab_size=100,
    hidden_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    num_experts=4,
    top_k=2,
)


def cost(shape=SHAPE, **changes):
    bits = changes.get("weight_bits", 16)
    both = {"weight_bits": bits, "embedding_bits": bits}
    values = {**both, "kv_bytes_per_token": 48, "num_tokens": 1, "num_sampled": 1, "num_seen": 10, **changes}
    return pass_cost(shape, **values)
