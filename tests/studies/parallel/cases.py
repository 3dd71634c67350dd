"""Small cases for tests, and what plain torch makes of them."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from studies.parallel.case import Case, LayerShape, Tokens
from studies.parallel.shared_weights import SharedWeights, make_experts


def shape(**changes: Any) -> LayerShape:
    fields = {"num_ranks": 3, "num_experts": 5, "top_k": 2, "hidden": 24, "width": 20, "is_gated": True}
    return LayerShape(**{**fields, "weights": "float32", **changes})


def case(layer: LayerShape | None = None, **changes: Any) -> Case:
    layer = layer or shape()
    fields = {"num_tokens": (7,) * layer.num_ranks, "router_skew": 0.6, "num_experts_skew": 1, "seed": 0}
    return Case(layer=layer, **{**fields, "capacity_factor": 1.25, **changes})


@contextmanager
def weights_of(layer: LayerShape):
    descriptor = SharedWeights.make_descriptor(layer)
    try:
        yield SharedWeights.open(layer, descriptor)
    finally:
        os.close(descriptor)


def plain_sums(layer: LayerShape, tokens: Tokens, is_kept: Tensor | None = None) -> Tensor:
    """Return the weighted sums of the experts that are kept, token by token, in float64."""
    experts = [(up.double(), down.double()) for up, down in make_experts(layer)]
    sums = torch.zeros(tokens.x.shape, dtype=torch.float64)
    for token, k in itertools.product(range(len(sums)), range(layer.top_k)):
        if is_kept is not None and not is_kept[token, k]:
            continue
        gate_up, down = experts[int(tokens.topk_ids[token, k])]
        units = gate_up @ tokens.x[token].double()
        if layer.is_gated:
            gate, up = units.split(layer.width)
            units = torch.nn.functional.silu(gate) * up
        else:
            units = units.relu()
        sums[token] += tokens.topk_weights[token, k].double() * (down @ units)
    return sums
