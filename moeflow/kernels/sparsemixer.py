"""SparseMixer's choice of experts (2409.12136, without its noise), in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def sparsemixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Return the best experts of each token, and what each weighs: as if those further below it were not there.

    An expert's weight is its share under a softmax over itself and experts with logits less than `2 * jitter` below,
    relative to the larger of the two. Each choice excludes earlier ones.

    Shapes: logits [T, E] float32 -> topk_ids [T, K] int64, topk_weights [T, K] float32.
    """
    left, ids, weights = logits, [], []
    for _ in range(top_k):
        best, place = left.max(dim=1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=1).gather(1, place))
        ids.append(place)
        left = left.scatter(1, place, -torch.inf)
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)
