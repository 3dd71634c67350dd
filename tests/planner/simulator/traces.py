"""Made-up routing: each layer stays with its experts for a while, and prefers some."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from moeflow.experts.predict.predictor import MAX_LOOK_AHEAD
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


def with_routers_ahead(trace):
    """Return a trace whose routers ahead are right."""
    passes = []
    for one in trace.passes:
        ahead = np.zeros((len(one.ids), MAX_LOOK_AHEAD, *one.ids.shape[1:]), dtype=one.ids.dtype)
        for layer, rows in enumerate(ahead):
            later = one.ids[layer + 1 : layer + 1 + MAX_LOOK_AHEAD]
            rows[: len(later)] = later
        passes.append(dataclasses.replace(one, ahead=ahead))
    return dataclasses.replace(trace, passes=passes)


def named_in(trace):
    """Return what a network would name that is right, and likeliest first."""
    return [[list(dict.fromkeys(layer.ravel().tolist())) for layer in one.ids] for one in trace.passes]
