"""Made-up routing: each layer stays with its experts for a while, and prefers some."""

from __future__ import annotations

import random

import numpy as np

from moeflow.workload.routing_trace import RoutedPass, RoutingTrace, TraceHeader


def make_trace(num_passes=60, *, num_layers=4, num_experts=16, top_k=2, num_tokens=1, stay=0.5, seed=0, compute_s=0.01):
    """Each token keeps each of the last pass's experts with probability `stay`; new ones are Zipf-distributed."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(num_experts)]
    orders = [chance.sample(range(num_experts), num_experts) for _ in range(num_layers)]
    last = [[chance.sample(range(num_experts), top_k) for _ in range(num_tokens)] for _ in range(num_layers)]
    passes = []
    for _ in range(num_passes):
        for layer, tokens in enumerate(last):
            for kept in tokens:
                kept[:] = [expert for expert in kept if chance.random() < stay]
                while len(kept) < top_k:
                    (drawn,) = chance.choices(orders[layer], weights)
                    if drawn not in kept:
                        kept.append(drawn)
        passes.append(RoutedPass(np.array(last), num_tokens, compute_s))
    header = TraceHeader(
        identity="made up", num_layers=num_layers, num_experts=num_experts, top_k=top_k, slab_bytes=1_000_000
    )
    return RoutingTrace(header, passes, 0)
