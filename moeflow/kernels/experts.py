"""The expert layer: every token through the experts its router chose, none dropped, none padded.

(Token, expert) pairs are sorted by expert, each touched expert runs once over its rows, and a token's results are
added up in the order its router listed them: that order does not depend on the tokens beside it.
This is the reference: it asks the device once per layer how many rows each expert got.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.kernels.activation import silu_and_mul
from moeflow.kernels.linear import linear


def fused_experts(x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, `down(silu(gate(x)) * up(x))`.

    The sum over a token's experts runs in float32 whatever x is.

    Shapes: x [T, H], gate_up [E, 2I, H] (gate rows first), down [E, H, I], topk_ids [T, K] int64,
    topk_weights [T, K] float32 -> [T, H] in x's dtype.
    Blocks: once, until the device knows topk_ids.
    """
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    if num_tokens == 1:  # nothing to sort: spares a decode eight small operations a layer
        pairs = torch.cat([_run_expert(x, gate_up, down, expert) for expert in topk_ids[0].tolist()])
    else:
        pairs = _run_sorted(x, gate_up, down, topk_ids)
    weighted = pairs.view(num_tokens, top_k, -1).float().mul_(topk_weights.unsqueeze(-1))
    return weighted.sum(dim=1).to(x.dtype)


def _run_sorted(x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor) -> Tensor:
    """Return each expert's result for each token that chose it: [T * K, H], in the order of topk_ids."""
    expert_of_pair = topk_ids.flatten()
    order = expert_of_pair.argsort(stable=True)
    rows = x.index_select(0, order.div(topk_ids.shape[1], rounding_mode="floor"))
    counts = torch.bincount(expert_of_pair, minlength=gate_up.shape[0]).tolist()
    results = [
        _run_expert(part, gate_up, down, expert)
        for expert, part in enumerate(torch.split(rows, counts))
        if counts[expert]
    ]
    return torch.empty_like(rows).index_copy_(0, order, torch.cat(results))


def _run_expert(rows: Tensor, gate_up: Tensor, down: Tensor, expert: int) -> Tensor:
    """Shapes: rows [n, H] -> [n, H]."""
    return linear(silu_and_mul(linear(rows, gate_up[expert])), down[expert])
