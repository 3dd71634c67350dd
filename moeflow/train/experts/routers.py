"""Fits first routers to trained experts: a token's hidden state tells its text, and so its expert.

A router is a softmax regression of the text on the inputs of the layer's block. The inputs are those in each text's
own branch, so that every expert gets the states it has learnt from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moeflow.train.experts.network import ExpertNetwork

_MAX_ROUNDS: Final = 30
_SHRINKAGE: Final = 1e-3  # of the squared weights, in the loss


def fit_domain_router(inputs: Sequence[Tensor]) -> Tensor:
    """Return the router whose expert e is likeliest for the inputs of text e.

    The same inputs give the same result. Shapes: inputs [T, H], one of each text -> [E, H] float32.
    """
    rows = torch.cat([each.float() for each in inputs])
    scale = rows.square().mean().sqrt().clamp_min(1e-6)
    rows = rows / scale
    labels = torch.cat([torch.full((len(each),), text) for text, each in enumerate(inputs)])
    weight = torch.zeros(len(inputs), rows.shape[1], requires_grad=True)
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS([weight], max_iter=_MAX_ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(rows @ weight.T, labels) + _SHRINKAGE * weight.square().sum()
        torch.autograd.backward(value)
        return float(value.detach())

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach() / scale


@torch.no_grad()
def block_inputs(network: ExpertNetwork, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of each layer's block. Shapes: pieces [n] int64 -> [T, H] bf16."""
    collected: list[list[Tensor]] = [[] for _ in range(network.shape.num_layers)]
    listening = replace(network, on_block=lambda layer, inputs, _: collected[layer].append(inputs.to(torch.bfloat16)))
    for piece in pieces:
        listening.mean_loss([piece])
    return [torch.cat(each) for each in collected]
