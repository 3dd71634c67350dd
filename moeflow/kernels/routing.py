"""Which experts a token goes to, given its router's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeflow.kernels.cpu import row_ops
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def softmax_topk(router_logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the `top_k` likeliest experts of each token and their weights, likeliest first.

    The softmax runs over all experts in float32; `renormalize` makes the chosen weights sum to 1.

    Which of two equally likely experts is chosen is not said.

    Shapes: router_logits [T, E] -> topk_ids [T, K] int64, topk_weights [T, K] float32.
    """
    if row_ops.accepts(router_logits):
        return row_ops.softmax_topk(router_logits, top_k, renormalize=renormalize)
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    topk_weights, topk_ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return topk_ids, topk_weights


def within_capacity(topk_ids: Tensor, topk_weights: Tensor, lengths: Sequence[int], capacity: int) -> Tensor:
    """Return weights of which those are 0 whose expert has `capacity` earlier choices of the same sequence already.

    Source: Switch Transformers (2101.03961), section 2.2; transformers counts by sequence, too.

    Shapes: topk_ids and topk_weights [T, K], of sequences of so many tokens one after another -> [T, K].
    """
    kept = torch.empty_like(topk_ids, dtype=torch.bool)
    start = 0
    for length in lengths:
        chosen = topk_ids[start : start + length].flatten()
        earlier = torch.nn.functional.one_hot(chosen).cumsum(0).gather(1, chosen[:, None])
        kept[start : start + length] = (earlier <= capacity).view(length, -1)
        start += length
    return topk_weights * kept


@dataclass(frozen=True, slots=True)
class SoftmaxTopK:
    """`softmax_topk` with its settings: how most families route. As data, so that a kernel may do it on the way."""

    top_k: int
    renormalize: bool

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: router_logits [T, E] -> topk_ids [T, K] int64, topk_weights [T, K] float32."""
        return softmax_topk(router_logits, self.top_k, renormalize=self.renormalize)
